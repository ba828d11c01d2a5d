"""The end of a process: interpreters of their own, that must end by themselves, and cleanly."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from failures import NOISE
from ranks import HOST, gloo_cannot
from torch._C._distributed_c10d import TCPStore

pytestmark = gloo_cannot("it has no such promises")

LIMIT = 60.0
ENDS_SOON = 12.0
"""Seconds from the event that ends the job to the end of its last process."""

PROLOGUE = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)

def mark(name):
    store.set(f"{rank}/{name}", "1")

def await_mark(other, name):
    store.wait([f"{other}/{name}"], timedelta(seconds=40))

def all_reduce(numel=3):
    dist.all_reduce(torch.ones(numel))

dist.init_process_group("tpu_dist", timeout=timedelta(seconds=40))
"""

# An interpreter that has imported torch, and forks itself for each script that it is sent: a script
# starts at once, and ends as any other does, by the whole of the interpreter's own finalisation.
NURSERY = """
import ctypes, json, os, signal, sys, threading
import torch, torch.distributed

def reap(pid):
    _, status = os.waitpid(pid, 0)
    say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

def say(what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def born(order):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    torch.set_num_threads(1)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)

script = ""
for line in iter(sys.stdin.readline, ""):
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        born(order)
        script = order["script"]
        break
    say({"rank": order["rank"], "pid": pid})
    threading.Thread(target=reap, args=(pid,), daemon=True).start()
exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
"""


class Nursery:
    """Owner of the interpreter that forks the ranks' interpreters; close() ends them all."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-u", "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, rank: int, script: str, folder: Path, log: Path, environment: Any) -> int:
        """Starts `script` as `rank`; returns the process id."""
        assert self._parent.stdin is not None
        order = {
            "rank": rank,
            "script": script,
            "folder": str(folder),
            "log": str(log),
            "environment": environment,
        }
        self._pids.pop(rank, None)
        self._parent.stdin.write((json.dumps(order) + "\n").encode())
        self._parent.stdin.flush()
        with self._changed:
            assert self._changed.wait_for(lambda: rank in self._pids, LIMIT), "no process started"
            return self._pids[rank]

    def code(self, pid: int, seconds: float) -> int | None:
        """Waits for the exit code of a process; None if it has not ended by then."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, seconds)
            return self._codes.get(pid)

    def close(self) -> None:
        self._parent.kill()  # its children go with it
        self._parent.wait(10)

    def _listen(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            said = json.loads(line)
            with self._changed:
                if "rank" in said:
                    self._pids[said["rank"]] = said["pid"]
                else:
                    self._codes[said["pid"]] = said["code"]
                self._changed.notify_all()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@dataclass
class Job:
    """Interpreters that run one script, each as one rank."""

    nursery: Nursery
    pids: list[int]
    logs: list[Path]
    store: TCPStore

    def await_mark(self, rank: int, name: str) -> None:
        self.store.wait([f"{rank}/{name}"], timedelta(seconds=LIMIT))

    def codes(self, ranks: list[int], seconds: float = ENDS_SOON) -> list[int]:
        """Waits until those ranks have ended: they must do so by themselves."""
        end = time.monotonic() + seconds
        codes = []
        for rank in ranks:
            code = self.nursery.code(self.pids[rank], max(0.1, end - time.monotonic()))
            if code is None:
                pytest.fail(
                    f"rank {rank} has not ended in {seconds} s; it said:\n{self.said(rank)}"
                )
            codes.append(code)
        return codes

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def assert_quiet(self, ranks: list[int]) -> None:
        for rank in ranks:
            noise = [words for words in NOISE if words in self.said(rank)]
            assert not noise, self.said(rank)


Start = Callable[[str, int], Job]


@pytest.fixture
def job(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Starts job(script, world_size); what is left of it is killed after the test."""
    started: list[Job] = []

    def start(script: str, world_size: int) -> Job:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        made = Job(nursery, [], [], store)
        started.append(made)
        for rank in range(world_size):
            made.logs.append(tmp_path / f"rank-{rank}.log")
            variables = environment(rank, world_size, store.port)
            made.pids.append(
                nursery.start(rank, PROLOGUE + script, tmp_path, made.logs[-1], variables)
            )
        return made

    yield start
    for made in started:
        for rank, pid in enumerate(made.pids):
            if nursery.code(pid, 0) is None:
                made.signal(rank, signal.SIGKILL)
                assert nursery.code(pid, 10) is not None


def environment(rank: int, world_size: int, port: int) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TPU_DIST_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_an_exception_on_one_rank_ends_the_others_with_its_name(job: Start) -> None:
    script = """
all_reduce()
mark("started")
if rank == 1:
    await_mark(0, "started")
    await_mark(2, "started")
    raise LookupError("the data ran out")
while True:
    all_reduce(300_000)
"""
    ranks = job(script, 3)
    ranks.await_mark(1, "started")
    assert ranks.codes([0, 1, 2]) == [1, 1, 1]
    assert "LookupError: the data ran out" in ranks.said(1)
    for rank in (0, 2):
        assert "PeerLostError" in ranks.said(rank) and "rank 1" in ranks.said(rank)
    ranks.assert_quiet([0, 1, 2])


def test_ctrl_c_in_a_blocked_collective_is_a_keyboard_interrupt_at_once(job: Start) -> None:
    script = """
all_reduce()
mark("blocked")
if rank == 0:
    began = time.monotonic()
    try:
        all_reduce(300_000)
    except KeyboardInterrupt:
        mark("interrupted")
        raise
await_mark(0, "interrupted")
mark("seen")
time.sleep(30)
"""
    ranks = job(script, 2)
    ranks.await_mark(0, "blocked")
    time.sleep(0.5)
    sent = time.monotonic()
    ranks.signal(0, signal.SIGINT)
    ranks.await_mark(1, "seen")
    assert time.monotonic() - sent < 2
    assert ranks.codes([0]) == [-signal.SIGINT]
    assert "KeyboardInterrupt" in ranks.said(0)
    ranks.assert_quiet([0])


@pytest.mark.parametrize("last_words", ["", "dist.destroy_process_group()"])
def test_a_script_that_just_ends_exits_with_zero(last_words: str, job: Start) -> None:
    script = f"""
all_reduce()
dist.barrier()
other = dist.new_group([0, 1])
dist.all_reduce(torch.ones(3), group=other)
if rank == 0:
    dist.send(torch.ones(100_000), dst=1)
else:
    dist.recv(torch.empty(100_000), src=0)
mark("done")
{last_words}
"""
    ranks = job(script, 2)
    for rank in (0, 1):
        ranks.await_mark(rank, "done")
    assert ranks.codes([0, 1]) == [0, 0]
    ranks.assert_quiet([0, 1])
    for rank in (0, 1):
        assert "Traceback" not in ranks.said(rank) and "Exception" not in ranks.said(rank)


def test_exiting_with_calls_under_way_hangs_nobody(job: Start) -> None:
    script = """
all_reduce()
work = dist.all_reduce(torch.ones(300_000), async_op=True) if rank == 0 else None
if rank == 0:
    works = [dist.barrier(async_op=True), dist.irecv(torch.empty(3), src=1)]
    work.get_future().then(lambda future: time.sleep(0.1))
mark("leaving")
if rank == 1:
    await_mark(0, "left")
else:
    mark("left")
sys.exit(3 + rank)
"""
    ranks = job(script, 2)
    ranks.await_mark(0, "leaving")
    assert ranks.codes([0, 1]) == [3, 4]
    ranks.assert_quiet([0, 1])


def test_a_callback_that_waits_for_a_peer_does_not_hold_up_the_exit(job: Start) -> None:
    script = """
all_reduce()
if rank == 1:
    await_mark(0, "asked")  # done before that, the callback would run in the main thread
work = dist.all_reduce(torch.ones(3), async_op=True)
if rank == 0:
    waits = threading.Event()
    def never_matched(future):
        waits.set()
        all_reduce()
    future = work.get_future().then(never_matched)
    mark("asked")
    waits.wait(20)
    time.sleep(0.2)
    mark("waiting")
    sys.exit(5)
work.wait()
await_mark(0, "waiting")
time.sleep(20)
"""
    ranks = job(script, 2)
    ranks.await_mark(0, "waiting")
    assert ranks.codes([0]) == [5]
    ranks.assert_quiet([0])


def test_an_abort_and_an_exit_while_a_peer_is_stopped(job: Start) -> None:
    script = """
all_reduce(300_000)
mark("ready")
if rank == 0:
    await_mark(0, "go")
    threading.Timer(0.5, dist.group.WORLD.abort).start()
    try:
        all_reduce(300_000)
    except RuntimeError as error:
        print(type(error).__name__, error)
        sys.exit(6)
time.sleep(40)
"""
    ranks = job(script, 2)
    for rank in (0, 1):
        ranks.await_mark(rank, "ready")
    ranks.signal(1, signal.SIGSTOP)
    ranks.store.set("0/go", "1")
    assert ranks.codes([0]) == [6]
    assert "CollectiveError group '0' was aborted" in ranks.said(0)
    ranks.assert_quiet([0])


@pytest.mark.parametrize("after", [0.03, 0.06, 0.12])
def test_a_peer_stopped_while_the_group_connects_does_not_hold_up_the_exit(
    after: float, job: Start
) -> None:
    script = """
dist.group.WORLD.set_timeout(timedelta(seconds=2))
dist.all_reduce(torch.ones(3), group=dist.new_group([rank]))
mark("connecting")
await_mark(1 - rank, "connecting")
all_reduce()
"""
    ranks = job(script, 2)
    for rank in (0, 1):
        ranks.await_mark(rank, "connecting")
    time.sleep(after)
    ranks.signal(1, signal.SIGSTOP)
    code = ranks.codes([0], 3 + ENDS_SOON)
    assert code in ([0], [1]), ranks.said(0)  # 0: it was through already
    if code == [1]:
        assert "CollectiveTimeoutError" in ranks.said(0)
    ranks.assert_quiet([0])


def test_a_killed_job_leaves_no_process_behind(job: Start) -> None:
    script = """
all_reduce()
mark("ready")
time.sleep(40)
"""
    ranks = job(script, 2)
    for rank in (0, 1):
        ranks.await_mark(rank, "ready")
    (service,) = children_of(ranks.pids[0])
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGKILL)
    end = time.monotonic() + ENDS_SOON
    while Path(f"/proc/{service}").exists():
        assert time.monotonic() < end, "the coordination service outlives its job"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Python processes that `pid` has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]
