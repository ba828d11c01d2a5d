"""init_process_group again in one process: after an end, after a failure, in another world."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import LARGE, all_reduce, assert_clean_exit, attempt
from ranks import BACKEND, Ranks, gloo_cannot, harness_store, mark, run_ranks, wait_mark
from torch._C._distributed_c10d import PrefixStore

pytestmark = gloo_cannot("its stores must be apart by themselves")


def join(how: str, name: str, rank: int, size: int, seconds: float = 30) -> None:
    """Joins a world: through the launcher's one store, as torchrun has it, or one's own."""
    timeout = timedelta(seconds=seconds)
    if how == "launcher":
        dist.init_process_group(BACKEND, rank=rank, world_size=size, timeout=timeout)
    else:
        store = PrefixStore(name, harness_store())
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)


def again_and_again(rank: int, how: str) -> None:
    for round_ in range(4):
        join(how, f"world {round_}", rank, 2)
        all_reduce()
        all_reduce(numel=LARGE)
        group = dist.new_group([0, 1])
        all_reduce(group)
        peer = 1 - rank
        received = torch.empty(3)
        works = [dist.irecv(received, peer), dist.isend(torch.full((3,), float(round_)), peer)]
        for work in works:
            work.wait()
        assert received.eq(round_).all()
        dist.destroy_process_group()
        assert not dist.is_initialized()


@pytest.mark.parametrize("how", ["launcher", "store of its own"])
def test_init_and_destroy_four_times(how: str) -> None:
    run_ranks(again_and_again, 2, init=False, args=(how,))


def after_a_timeout(rank: int, how: str, warm: bool) -> list[Any]:
    join(how, "first", rank, 2)
    if warm:
        all_reduce(numel=LARGE)
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    failures = []
    if rank == 0:
        failures.append(attempt(all_reduce))
        mark("gave up")
    else:
        wait_mark(0, "gave up")
    dist.destroy_process_group()
    join(how, "second", rank, 2)
    all_reduce()
    all_reduce(numel=LARGE)
    dist.destroy_process_group()
    return failures


@pytest.mark.parametrize(("how", "warm"), [("launcher", False), ("store of its own", True)])
def test_a_world_after_one_that_timed_out_is_sound(how: str, warm: bool) -> None:
    with Ranks(after_a_timeout, 2, init=False, args=(how, warm)) as ranks:
        outcomes = ranks.results(timedelta(seconds=60))
        for outcome in outcomes:
            assert outcome.ok, outcome.traceback
        assert outcomes[0].value[0].error == "CollectiveTimeoutError"
        assert_clean_exit(ranks, [0, 1])


def after_a_mismatch_and_an_abort(rank: int) -> None:
    join("launcher", "first", rank, 2)
    assert attempt(lambda: all_reduce(numel=3 + rank)).error == "MismatchError"
    assert dist.group.WORLD is not None
    dist.group.WORLD.abort()
    assert attempt(all_reduce).error == "CollectiveError"
    dist.destroy_process_group()
    join("launcher", "second", rank, 2)
    all_reduce(numel=LARGE)
    dist.destroy_process_group()


def test_a_world_after_an_abort_is_sound() -> None:
    run_ranks(after_a_mismatch_and_an_abort, 2, init=False)


def smaller_then_larger(rank: int, how: str) -> None:
    join(how, "four", rank, 4)
    all_reduce(numel=LARGE)
    dist.destroy_process_group()
    if rank < 2:
        join(how, "two", rank, 2)
        all_reduce(numel=LARGE)
        all_reduce()
        dist.destroy_process_group()
        mark("was two")
    else:
        for other in range(2):
            wait_mark(other, "was two")
    join(how, "four again", rank, 4)
    all_reduce(numel=LARGE)
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["launcher", "store of its own"])
def test_the_world_may_shrink_and_grow(how: str) -> None:
    run_ranks(smaller_then_larger, 4, init=False, args=(how,))


def survivors_start_again(rank: int) -> None:
    join("own", "three", rank, 3)
    all_reduce(numel=LARGE)
    mark("running")
    while (result := attempt(lambda: all_reduce(numel=LARGE))).ok:
        pass
    assert "rank 1" in result.text
    dist.destroy_process_group()
    join("own", "two", [0, -1, 1][rank], 2)
    all_reduce(numel=LARGE)
    all_reduce()
    dist.destroy_process_group()


def test_survivors_of_a_killed_rank_start_a_smaller_world() -> None:
    with Ranks(survivors_start_again, 3, init=False) as ranks:
        for rank in range(3):
            ranks.wait_mark(rank, "running")
        ranks.kill(1)
        for outcome in ranks.results(timedelta(seconds=60), of=[0, 2]):
            assert outcome.ok, outcome.traceback
        assert_clean_exit(ranks, [0, 2])


def nothing_is_left_over(rank: int) -> Any:
    """Messages, barriers and calls of the last world are not the next one's."""
    join("own", "first", rank, 2)
    for _ in range(5):
        all_reduce()
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        dist.isend(torch.full((3,), 7.0), dst=1)  # never received
        barrier = attempt(lambda: group.monitored_barrier(timedelta(seconds=0.5)))
        assert barrier.error == "CollectiveTimeoutError"
        mark("left messages")
    else:
        wait_mark(0, "left messages")
    dist.destroy_process_group()
    join("own", "second", rank, 2)
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier(timedelta(seconds=20))
    received = torch.empty(3)
    if rank == 0:
        dist.send(torch.full((3,), 8.0), dst=1)
    else:
        dist.recv(received, src=0)
        assert received.eq(8).all(), received
    group.set_timeout(timedelta(seconds=1))
    if rank == 0:
        result = attempt(all_reduce)
        mark("timed out")
        return result
    wait_mark(0, "timed out")
    return None


def test_nothing_of_one_world_is_left_over_in_the_next() -> None:
    with Ranks(nothing_is_left_over, 2, init=False) as ranks:
        outcomes = ranks.results(timedelta(seconds=60))
        for outcome in outcomes:
            assert outcome.ok, outcome.traceback
        result = outcomes[0].value
        assert result.error == "CollectiveTimeoutError" and "missing ranks [1]" in result.text


def one_comes_late(rank: int) -> float:
    join("launcher", "first", rank, 2)
    all_reduce()
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(1.0)
    started = time.monotonic()
    join("launcher", "second", rank, 2)
    all_reduce()
    dist.destroy_process_group()
    return time.monotonic() - started


def test_a_rank_that_comes_late_to_the_second_world_is_waited_for() -> None:
    assert min(run_ranks(one_comes_late, 2, init=False)) < 30


def leaks(rank: int) -> list[tuple[int, int]]:
    """Open files and threads after each of several worlds that were all new."""
    counts = []
    for round_ in range(5):
        join("own", f"world {round_}", rank, 2)
        all_reduce(numel=LARGE)
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()  # the next world starts a new client
        dist.destroy_process_group()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def test_worlds_leave_no_open_files_and_no_threads_behind() -> None:
    for counts in run_ranks(leaks, 2, init=False):
        files, threads = zip(*counts, strict=True)
        assert files[-1] <= files[1] + 2, counts
        assert threads[-1] <= threads[1] + 8, counts
