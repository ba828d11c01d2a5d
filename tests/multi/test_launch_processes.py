"""WorkerProcesses on real processes: what is ended, what is left alone, and who gives up when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from launch_harness import eventually

from tpu_dist.launch import processes
from tpu_dist.launch.processes import Worker, WorkerProcesses

pytestmark = pytest.mark.timeout(60)

Start = Callable[[str], WorkerProcesses]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start_shell(code: str) -> WorkerProcesses:
        process = subprocess.Popen(["sh", "-c", code], start_new_session=True)
        started.append(process)
        return WorkerProcesses([Worker(rank=0, local_rank=0, process=process)])

    yield start_shell
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def group_of(workers: WorkerProcesses) -> int:
    return eventually(lambda: workers.exits, "the worker ends")[0].pid


def test_an_end_is_known_with_its_status_and_time(start: Start) -> None:
    before = time.time()
    workers = start("exit 4")
    eventually(lambda: workers.all_ended, "the worker ends")
    (end,) = workers.failures
    assert (end.exit_code, end.asked) == (4, False)
    assert before <= end.at <= time.time()


def test_who_was_asked_to_end_did_not_fail(start: Start) -> None:
    workers = start("exec sleep 300")
    assert workers.stop(signal.SIGTERM, timedelta(seconds=20)) == 0
    assert workers.failures == ()
    assert [(end.exit_code, end.asked) for end in workers.exits] == [(-signal.SIGTERM, True)]


def test_children_of_a_failed_worker_are_ended_and_not_waited_for_in_vain(start: Start) -> None:
    workers = start("sleep 300 & exit 3")
    group = group_of(workers)
    before = time.monotonic()
    assert workers.stop(signal.SIGTERM, timedelta(seconds=30)) == 0
    assert time.monotonic() - before < 10
    assert not processes._group_exists(group)


def test_children_of_a_worker_that_ended_well_are_left_alone(start: Start) -> None:
    workers = start("sleep 300 & exit 0")
    group = group_of(workers)
    workers.stop(signal.SIGTERM, timedelta(seconds=30))
    workers.kill()
    assert processes._group_exists(group)


def test_a_process_that_outlives_sigkill_is_not_waited_for_for_ever(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = start("exec sleep 300")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_KILL_TIMEOUT", timedelta(seconds=0.2))
        patch.setattr(os, "killpg", lambda group, signum: None)
        with pytest.raises(TimeoutError, match="still exist .* after SIGKILL"):
            workers.stop(signal.SIGTERM, timedelta(seconds=0.1))
    workers.kill()
    eventually(lambda: workers.all_ended, "the worker ends")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_zombie_is_no_living_member() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    os.killpg(process.pid, 0)  # which still reaches it
    assert not processes._group_exists(process.pid)
    assert process.wait() == 0
