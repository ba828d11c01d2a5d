"""Collectives under way that write to tensors on the device, and failures that nobody has seen.

wait() on such a call does not block the host: whoever touches the tensor then waits, and is told if
the call has failed. So a failure could go unseen where nobody touches it any more. It is kept here
until somebody has seen it: synchronize(), .item() and .cpu() raise it, and the end of its group or
of the process logs it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol


class WritingCall(Protocol):
    """A collective that writes to boxes."""

    def settle(self) -> None:
        """Block until it is done; raises the error it ended with, which is seen then."""

    def join(self) -> None:
        """Block until it is done, well or not."""

    def is_completed(self) -> bool:
        """Whether it is done, well or not."""


class _Filling(threading.local):
    depth = 0


FILLING = _Filling()
"""Its depth is more than 0 on a thread that does a call's own work."""


@contextlib.contextmanager
def filling() -> Iterator[None]:
    """In the block this thread writes what a call brings: it must not wait for that call."""
    FILLING.depth += 1
    try:
        yield
    finally:
        FILLING.depth -= 1


_under_way: dict[WritingCall, None] = {}  # in order of their calls
_unseen: dict[WritingCall, BaseException] = {}


def begin(call: WritingCall) -> None:
    """A call writes to tensors on the device from now on."""
    _under_way[call] = None


def end(call: WritingCall, error: BaseException | None) -> None:
    """It does no longer."""
    if error is not None:
        _unseen[call] = error
    _under_way.pop(call, None)


def under_way() -> list[WritingCall]:
    """The calls that are, in their order."""
    return list(_under_way)


def see(call: WritingCall) -> None:
    """Somebody has got the call's error."""
    _unseen.pop(call, None)


def take_unseen() -> list[BaseException]:
    """The failures that nobody has seen, in their order; they are seen now."""
    taken = []
    while _unseen:
        with contextlib.suppress(KeyError):  # another thread may be faster
            taken.append(_unseen.pop(next(iter(_unseen))))
    return taken


def raise_unseen() -> None:
    """Raise the first failure that nobody has seen; the others remain."""
    if _unseen:
        with contextlib.suppress(KeyError, StopIteration):
            error = _unseen.pop(next(iter(_unseen)))
            raise error


def settle_all() -> None:
    """Block until all that is under way now is done; raises the first failure."""
    for call in under_way():
        call.settle()
    raise_unseen()
