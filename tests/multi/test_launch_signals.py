"""Signals to the launcher: workers hear of them, all end, and the status says which it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_harness import Launch, Launches, eventually, launches

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Launches]:
    with launches(tmp_path) as running:
        yield running


LISTENING = """
def heard(signum, frame):
    note("heard", signal.Signals(signum).name)
    sys.exit(0)
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(signum, heard)
note("pid", os.getpid())
sleep_for_ever()
"""

DEAF = """
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
note("child", subprocess.Popen(["sleep", "300"]).pid)
note("pid", os.getpid())
sleep_for_ever()
"""


def started(launch: Launch, num_workers: int = 2) -> list[int]:
    return [launch.note("pid", rank=rank) for rank in range(num_workers)]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_is_forwarded_and_ends_the_run(runs: Launches, name: str) -> None:
    launch = runs.start("--nproc-per-node=2", runs.script("train.py", LISTENING))
    started(launch)
    launch.signal(signal.Signals[name])
    assert launch.wait() == 128 + signal.Signals[name]
    assert [launch.note("heard", rank=rank) for rank in range(2)] == [name, name]
    assert f"tpu-launch: {name}: asking 2 running workers to end" in launch.stderr
    assert "Traceback" not in launch.stderr
    assert launch.living() == []


def test_workers_that_ignore_the_signal_are_killed_with_their_children(runs: Launches) -> None:
    script = runs.script("train.py", DEAF)
    launch = runs.start("--nproc-per-node=2", "--shutdown-timeout=0.5", script)
    started(launch)
    assert len(launch.living()) == 5
    before = time.monotonic()
    launch.signal(signal.SIGTERM)
    assert launch.wait() == 143
    assert 0.5 < time.monotonic() - before < 10
    assert launch.living() == []


def test_a_second_signal_kills_at_once(runs: Launches) -> None:
    script = runs.script("train.py", DEAF)
    launch = runs.start("--nproc-per-node=2", "--shutdown-timeout=300", script)
    started(launch)
    launch.signal(signal.SIGINT)
    eventually(lambda: "SIGINT: asking" in launch.stderr, "the first is taken")
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130
    assert launch.living() == []


@pytest.mark.parametrize("body", [LISTENING, DEAF])
def test_stopped_workers_end_too(runs: Launches, body: str) -> None:
    script = runs.script("train.py", body)
    launch = runs.start("--nproc-per-node=2", "--shutdown-timeout=0.5", script)
    for pid in started(launch):
        os.kill(pid, signal.SIGSTOP)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130
    assert launch.living() == []


def test_a_stopped_worker_ends_when_another_fails(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        if RANK == 1:
            note("ready")
            os.kill(os.getpid(), signal.SIGSTOP)
            sleep_for_ever()
        wait_for("ready", 1)
        sys.exit(5)
        """,
    )
    before = time.monotonic()
    status, _ = runs.run("--nproc-per-node=2", script)
    assert status == 5
    assert time.monotonic() - before < 10  # not the grace of 30 s


def test_a_failure_is_reported_also_if_a_signal_comes_while_the_others_end(
    runs: Launches,
) -> None:
    script = runs.script(
        "train.py",
        """
        if RANK == 1:
            signal.signal(signal.SIGTERM, lambda *_: note("asked"))
            note("ready")
            sleep_for_ever()
        wait_for("ready", 1)
        sys.exit(5)
        """,
    )
    launch = runs.start("--nproc-per-node=2", "--max-restarts=1", "--shutdown-timeout=1", script)
    launch.note("asked", rank=1)
    launch.signal(signal.SIGINT)
    assert launch.wait() == 130
    assert "rank 0 exited with status 5" in launch.stderr
    assert "anew" not in launch.stderr


def test_a_signal_does_not_wait_for_the_next_look_at_the_workers(runs: Launches) -> None:
    script = runs.script("train.py", LISTENING)
    launch = runs.start("--nproc-per-node=2", "--monitor-interval=300", script)
    started(launch)
    launch.signal(signal.SIGTERM)
    assert launch.wait() == 143


def test_a_signal_while_the_workers_start_leaves_none(runs: Launches) -> None:
    script = runs.script("train.py", DEAF)
    for delay in (0.04, 0.06, 0.08, 0.1, 0.12):
        launch = runs.start("--nproc-per-node=4", "--shutdown-timeout=0.2", script)
        time.sleep(delay)  # wherever it finds the launcher
        launch.signal(signal.SIGTERM)
        assert launch.wait() in (143, -signal.SIGTERM)  # the latter before it handles signals
        assert launch.living() == []


def test_workers_do_not_outlive_a_killed_launcher(runs: Launches) -> None:
    script = runs.script("train.py", LISTENING)
    launch = runs.start("--nproc-per-node=2", script)
    started(launch)
    launch.signal(signal.SIGKILL)
    assert launch.wait() == -signal.SIGKILL
    eventually(lambda: not launch.living(), "the workers end", seconds=5)


def test_a_signal_ignored_from_the_start_stays_ignored(runs: Launches) -> None:
    launcher = runs.script(
        "nohup.py",
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from tpu_dist.launch.cli import main
        sys.exit(main(sys.argv[1:]))
        """,
    )
    # One launcher runs another, as that is how to start one with a signal ignored.
    script = runs.script(
        "train.py",
        """
        note("pid", os.getpid())
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(0.3)
        sys.exit(3)
        """,
    )
    launch = runs.start(launcher, script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert launch.wait() == 3
