"""The harness itself: what it reports of ranks that fail, die, hang or are frozen."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, RankPool, Ranks, RanksFailed, mark, run_ranks, wait_mark


def total(rank: int, extra: int) -> tuple[int, float, str]:
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return rank, value.item() + extra, dist.get_backend()


def surroundings(rank: int) -> dict[str, object]:
    return {
        "env": {k: os.environ.get(k) for k in ("RANK", "OMP_NUM_THREADS", "MINE", "HOME")},
        "threads": torch.get_num_threads(),
        "initialized": dist.is_initialized(),
        "jax": "jax" in sys.modules,
    }


def raise_on_one(rank: int) -> str:
    if rank == 1:
        print("words before the end")
        raise KeyError("seven")
    return "fine"


def exit_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def hang_in_sleep_xyz(rank: int) -> None:
    if rank == 0:
        subprocess.Popen(["sleep", "1234"])
        mark("child")
        time.sleep(600)


def finish_or_wait(rank: int) -> str:
    mark("start")
    if rank == 0:
        wait_mark(1, "start")
        time.sleep(0.3)
        return "survived"
    time.sleep(600)
    return "never"


def return_a_lock(rank: int) -> object:
    import threading

    return threading.Lock()


def join_by_environment(rank: int) -> float:
    dist.init_process_group(BACKEND)
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def pid(rank: int) -> int:
    return os.getpid()


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def group_alive(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_runs_and_returns_in_order() -> None:
    assert run_ranks(total, 3, args=(10,)) == [(rank, 16.0, BACKEND) for rank in range(3)]


def test_environment_is_the_ranks_own() -> None:
    seen = run_ranks(surroundings, 2, init=False, env={"MINE": "x", "HOME": None})
    for rank, one in enumerate(seen):
        assert one == {
            "env": {"RANK": str(rank), "OMP_NUM_THREADS": "1", "MINE": "x", "HOME": None},
            "threads": 1,
            "initialized": False,
            "jax": False,
        }
    assert "MINE" not in os.environ


def test_ranks_may_join_by_environment_as_under_torchrun() -> None:
    assert run_ranks(join_by_environment, 2, init=False) == [2.0, 2.0]


def test_exception_is_shown_with_the_others_states() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(raise_on_one, 2)
    text = str(failure.value)
    assert "rank 0: finished" in text
    assert "rank 1: raised KeyError: 'seven'" in text
    assert "raise_on_one" in text and "words before the end" in text


def test_exit_code_is_shown() -> None:
    with pytest.raises(RanksFailed, match="rank 1: exited with code 3"):
        run_ranks(exit_on_one, 2)


def test_result_that_does_not_pickle_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match="cannot pickle"):
        run_ranks(return_a_lock, 2)


def test_deadline_shows_stacks_and_kills_ranks_and_their_children() -> None:
    ranks = Ranks(hang_in_sleep_xyz, 2)
    ranks.wait_mark(0, "child")
    pids = ranks.pids
    with pytest.raises(RanksFailed) as failure:
        ranks.results(timedelta(seconds=2))
    assert "ranks [0] did not finish" in str(failure.value)
    assert "in hang_in_sleep_xyz" in str(failure.value)
    assert not any(alive(number) for number in pids)
    end = time.monotonic() + 5  # an orphan is reaped by init, in its own time
    while group_alive(pids[0]):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_killed_rank_is_told_from_the_survivor() -> None:
    with Ranks(finish_or_wait, 2) as ranks:
        ranks.wait_mark(1, "start")
        ranks.kill(1)
        survivor, dead = ranks.results(timedelta(seconds=20))
        assert survivor.value == "survived"
        assert dead.died == f"died by signal {signal.SIGKILL}"


def test_stopped_rank_does_not_hold_up_the_others_results_nor_the_end() -> None:
    with Ranks(finish_or_wait, 2) as ranks:
        ranks.wait_mark(1, "start")
        ranks.stop(1)
        pids = ranks.pids
        assert ranks.results(timedelta(seconds=20), of=[0])[0].value == "survived"
        with pytest.raises(RanksFailed, match="did not answer SIGUSR1"):
            ranks.results(timedelta(seconds=0.5))
    assert not any(alive(number) for number in pids)


def test_pool_keeps_its_processes_until_a_rank_fails() -> None:
    with RankPool(2) as pool:
        first = pool(pid)
        assert pool(pid) == first
        with pytest.raises(RanksFailed, match="KeyError"):
            pool(raise_on_one)
        assert not any(alive(number) for number in first)
        second = pool(pid)
        assert not set(first) & set(second)
        assert pool(total, 0) == [(0, 3.0, BACKEND), (1, 3.0, BACKEND)]
    assert not any(alive(number) for number in second)
