"""Asking the ranks of a stalled collective where they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass

from tpu_dist.collectives.task import Call
from tpu_dist.runtime.channel import Channel, Meta
from tpu_dist.topology.errors import PeerLostError

ANSWER_SECONDS = 1.0  # a live process answers in a millisecond, a busy one in some


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The last call that a rank has made on a group."""

    sequence: int
    call: str


def find_absent(
    channel: Channel, call: Call, own_rank: int, *, only_lost: bool = False
) -> Mapping[int, str]:
    """Find the ranks that have not made `call`, and what is known of each.

    Asks all at once; takes ANSWER_SECONDS at most where somebody does not answer.

    Args:
        channel: of this process.
        call: the stalled call.
        own_rank: this process's rank.
        only_lost: leave out all but those whose process has ended.

    Returns:
        Global rank to words, for the ranks that are missing.
    """
    asked: dict[int, Future[Meta]] = {
        rank: channel.ask(rank, "where", {"group": call.uid})
        for rank in call.ranks
        if rank != own_rank
    }
    absent: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    for rank, answer in asked.items():
        try:
            said = answer.result(timeout=max(0.0, deadline - time.monotonic()))
        except PeerLostError:
            absent[rank] = "its process has ended"
        except NoAnswer:
            if not only_lost:
                absent[rank] = "its process does not answer (stopped, or its machine is cut off)"
        else:
            if not only_lost and said["sequence"] < call.sequence:
                last = said["call"] or "none"
                absent[rank] = f"its last call on the group was {last}"
    return absent


def describe_absent(absent: Mapping[int, str]) -> str:
    """Put what find_absent() found into words, with what to do."""
    if not absent:
        return (
            "every rank has called it and answers, so the transport between them is slow or cut. "
            "Raise the timeout, or look at the network."
        )
    each = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(absent.items()))
    ranks = ", ".join(map(str, sorted(absent)))
    return f"missing ranks [{ranks}] ({each}). Look at the logs of those ranks first."
