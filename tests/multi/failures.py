"""What the tests of failures share: trying a call, and looking at what ranks have printed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks

LARGE = (9 << 20) // 4 + 3
"""Elements of float32: three chunks and a rest."""

NOISE = ("Fatal Python error", "core dumped", "terminate called", "Check failed", "Aborted")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of one call: "" and "" if it returned, else the error's type and text."""

    error: str
    text: str
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.error


def attempt(call: Callable[[], Any]) -> Attempt:
    """In a rank: calls, and says how it ended and how long that took."""
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # the tests are about errors of every kind
        return Attempt(type(error).__name__, str(error), time.monotonic() - started)
    return Attempt("", "", time.monotonic() - started)


def await_end(work: dist.Work, limit: timedelta) -> Attempt:
    """In a rank: watches a work that nobody waits for until it has ended."""
    started = time.monotonic()
    while not work.is_completed() and time.monotonic() - started < limit.total_seconds():
        time.sleep(0.01)
    seconds = time.monotonic() - started
    error = work.exception() if work.is_completed() else TimeoutError("it has not ended")
    if error is None:
        return Attempt("", "", seconds)
    return Attempt(type(error).__name__, str(error), seconds)


def all_reduce(group: dist.ProcessGroup | None = None, numel: int = 3) -> None:
    """In a rank: an all_reduce of ones, its result checked."""
    tensor = torch.ones(numel)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(dist.get_world_size(group)).all(), tensor


def noise(ranks: Ranks, rank: int) -> list[str]:
    """What a crash would have printed, from the last lines of a rank's output."""
    tail = ranks._tail(rank)
    return [words for words in NOISE if words in tail]


def assert_clean_exit(ranks: Ranks, survivors: list[int], seconds: float = 15.0) -> None:
    """Has the survivors destroy their groups and exit: with code 0, in time, without noise."""
    started = time.monotonic()
    exits = ranks.finish(timedelta(seconds=seconds + 10))
    took = time.monotonic() - started
    for rank in survivors:
        assert exits[rank] == "exited with code 0", (rank, exits[rank], ranks._tail(rank))
        assert noise(ranks, rank) == [], ranks._tail(rank)
    assert took < seconds, f"the exit took {took:.1f} s"
