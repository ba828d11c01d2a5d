"""A task: one call of the user's, from the moment it is made to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from tpu_dist.topology.errors import CollectiveError

Settled = Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the user called, for messages and records.

    Attributes:
        group: name of the process group, for people.
        uid: tells the group from all others that this process has had, also of the same name.
        sequence: number of the call in its group, from 1; 0 for point-to-point calls.
        verb: as torch.distributed spells it.
        ranks: global ranks of the group.
        detail: dtype, shape and the like, in words.
    """

    group: str
    uid: str
    sequence: int
    verb: str
    ranks: tuple[int, ...]
    detail: str = ""

    def __str__(self) -> str:
        number = f" #{self.sequence}" if self.sequence else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.verb}{number} of group {self.group!r}{detail}"


class Owner(Protocol):
    """Who runs a task, and ends it when it cannot go on."""

    def expire(self, task: Task) -> None:
        """Its time is over: say what is missing, and settle it."""

    def give_up(self, task: Task, error: CollectiveError) -> None:
        """It cannot be finished, for the reason given: settle it with that."""


class Task:
    """Settled exactly once, by whoever comes first: who runs it, the watchdog, or an abort."""

    def __init__(self, call: Call, timeout: timedelta, owner: Owner, settled: Settled) -> None:
        """Start the clock.

        Args:
            call: what it is.
            timeout: until the watchdog calls the owner's expire().
            owner: who runs it; may change.
            settled: called once, with the error or None, on the thread that settles it.
        """
        self.call = call
        self.timeout = timeout
        self.started = time.monotonic()
        self.deadline = self.started + timeout.total_seconds()
        self.owner = owner
        self._settled = settled
        self._lock = threading.Lock()
        self.is_settled = False

    def settle(self, error: BaseException | None = None) -> bool:
        """End it; False if it had ended before."""
        with self._lock:
            if self.is_settled:
                return False
            self.is_settled = True
        self._settled(error)
        return True
