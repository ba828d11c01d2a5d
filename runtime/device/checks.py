"""What programs find to be wrong in their inputs' values, such as an index out of range.

A program cannot raise. It returns a flag beside its results; whoever dispatched it leaves the flag
here with the error it stands for. Where looking is free of cost (the CPU stand-in) or asked for
(Debug mode) the error is raised at once; on a TPU when the host next waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tpu_dist.runtime.device import calls
from tpu_dist.runtime.device.modes import is_blocking
from tpu_dist.runtime.device.place import place

Flag = Any
_MAX_PENDING = 256

_lock = threading.Lock()
_pending: list[tuple[Flag, Callable[[], Exception]]] = []


def report(flag: Flag, error: Callable[[], Exception]) -> None:
    """Have `error` raised if `flag`, a 0-d array of the device, is true."""
    if is_blocking() or place().platform == "cpu":
        if bool(flag):
            raise error()
        return
    with _lock:
        _pending.append((flag, error))
        is_full = len(_pending) > _MAX_PENDING
    if is_full:
        raise_pending()


def raise_pending() -> None:
    """Raise the first error that was found since the last call; waits for those who look for it.

    Also that of a collective, if nobody has seen it.
    """
    calls.raise_unseen()
    if not _pending:
        return
    with _lock:
        found = list(_pending)
        _pending.clear()
    for flag, error in found:
        if bool(flag):
            raise error()
