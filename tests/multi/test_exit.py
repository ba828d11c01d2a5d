"""The end of a process: interpreters of their own, that must end by themselves, and cleanly."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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


@dataclass
class Job:
    """Interpreters that run one script, each as one rank."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    store: TCPStore

    def await_mark(self, rank: int, name: str) -> None:
        self.store.wait([f"{rank}/{name}"], timedelta(seconds=LIMIT))

    def codes(self, ranks: list[int], seconds: float = ENDS_SOON) -> list[int]:
        """Waits until those ranks have ended: they must do so by themselves."""
        end = time.monotonic() + seconds
        codes = []
        for rank in ranks:
            try:
                codes.append(self.processes[rank].wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} has not ended in {seconds} s; it said:\n{self.said(rank)}")
        return codes

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def assert_quiet(self, ranks: list[int]) -> None:
        for rank in ranks:
            noise = [words for words in NOISE if words in self.said(rank)]
            assert not noise, self.said(rank)


@contextmanager
def job(script: str, world_size: int, folder: Path) -> Iterator[Job]:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    processes, logs = [], []
    try:
        for rank in range(world_size):
            logs.append(folder / f"rank-{rank}.log")
            with logs[-1].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-c", PROLOGUE + script],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        cwd=folder,
                        env={**os.environ, **environment(rank, world_size, store.port)},
                    )
                )
        yield Job(processes, logs, store)
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


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


def test_an_exception_on_one_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
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
    with job(script, 3, tmp_path) as ranks:
        ranks.await_mark(1, "started")
        assert ranks.codes([0, 1, 2]) == [1, 1, 1]
        assert "LookupError: the data ran out" in ranks.said(1)
        for rank in (0, 2):
            assert "PeerLostError" in ranks.said(rank) and "rank 1" in ranks.said(rank)
        ranks.assert_quiet([0, 1, 2])


def test_ctrl_c_in_a_blocked_collective_is_a_keyboard_interrupt_at_once(tmp_path: Path) -> None:
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
    with job(script, 2, tmp_path) as ranks:
        ranks.await_mark(0, "blocked")
        time.sleep(0.5)
        sent = time.monotonic()
        ranks.processes[0].send_signal(signal.SIGINT)
        ranks.await_mark(1, "seen")
        assert time.monotonic() - sent < 2
        assert ranks.codes([0]) == [-signal.SIGINT]
        assert "KeyboardInterrupt" in ranks.said(0)
        ranks.assert_quiet([0])


@pytest.mark.parametrize("last_words", ["", "dist.destroy_process_group()"])
def test_a_script_that_just_ends_exits_with_zero(last_words: str, tmp_path: Path) -> None:
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
    with job(script, 2, tmp_path) as ranks:
        for rank in (0, 1):
            ranks.await_mark(rank, "done")
        assert ranks.codes([0, 1]) == [0, 0]
        ranks.assert_quiet([0, 1])
        for rank in (0, 1):
            assert "Traceback" not in ranks.said(rank) and "Exception" not in ranks.said(rank)


def test_exiting_with_calls_under_way_hangs_nobody(tmp_path: Path) -> None:
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
    with job(script, 2, tmp_path) as ranks:
        ranks.await_mark(0, "leaving")
        assert ranks.codes([0, 1]) == [3, 4]
        ranks.assert_quiet([0, 1])


def test_a_callback_that_waits_for_a_peer_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    script = """
all_reduce()
work = dist.all_reduce(torch.ones(3), async_op=True)
if rank == 0:
    waits = threading.Event()
    def never_matched(future):
        waits.set()
        all_reduce()
    future = work.get_future().then(never_matched)
    waits.wait(20)
    time.sleep(0.2)
    mark("waiting")
    sys.exit(5)
work.wait()
await_mark(0, "waiting")
time.sleep(20)
"""
    with job(script, 2, tmp_path) as ranks:
        ranks.await_mark(0, "waiting")
        assert ranks.codes([0]) == [5]
        ranks.assert_quiet([0])


def test_an_abort_and_an_exit_while_a_peer_is_stopped(tmp_path: Path) -> None:
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
    with job(script, 2, tmp_path) as ranks:
        for rank in (0, 1):
            ranks.await_mark(rank, "ready")
        ranks.processes[1].send_signal(signal.SIGSTOP)
        ranks.store.set("0/go", "1")
        assert ranks.codes([0]) == [6]
        assert "CollectiveError group '0' was aborted" in ranks.said(0)
        ranks.assert_quiet([0])


@pytest.mark.parametrize("after", [0.05, 0.12])
def test_a_peer_stopped_while_the_group_connects_does_not_hold_up_the_exit(
    after: float, tmp_path: Path
) -> None:
    script = """
dist.group.WORLD.set_timeout(timedelta(seconds=2))
dist.all_reduce(torch.ones(3), group=dist.new_group([rank]))
mark("connecting")
await_mark(1 - rank, "connecting")
all_reduce()
"""
    with job(script, 2, tmp_path) as ranks:
        for rank in (0, 1):
            ranks.await_mark(rank, "connecting")
        time.sleep(after)
        ranks.processes[1].send_signal(signal.SIGSTOP)
        code = ranks.codes([0], 3 + ENDS_SOON)
        assert code in ([0], [1]), ranks.said(0)  # 0: it was through already
        if code == [1]:
            assert "CollectiveTimeoutError" in ranks.said(0)
        ranks.assert_quiet([0])


def test_a_killed_job_leaves_no_process_behind(tmp_path: Path) -> None:
    script = """
all_reduce()
mark("ready")
time.sleep(40)
"""
    with job(script, 2, tmp_path) as ranks:
        for rank in (0, 1):
            ranks.await_mark(rank, "ready")
        (service,) = children_of(ranks.processes[0].pid)
        for process in ranks.processes:
            process.kill()
        end = time.monotonic() + ENDS_SOON
        while Path(f"/proc/{service}").exists():
            assert time.monotonic() < end, "the coordination service outlives its job"
            time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Python processes that `pid` has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]
