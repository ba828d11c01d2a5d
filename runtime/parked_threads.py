"""Keeping a thread that is stuck in native code from spoiling the end of its process."""

from __future__ import annotations

import ctypes
import signal
import threading
from pathlib import Path

_SIGNAL = signal.SIGRTMAX  # the last one: nobody's, as far as there is a custom


def park(thread: threading.Thread) -> None:
    """Never let `thread`, which sleeps in native code, come back to Python.

    CPython up to 3.13 ends a daemon thread that comes back after the interpreter is gone by
    unwinding its stack. Frames of C++ on it do not let themselves be unwound: the process dies of
    std::terminate (exit code -6), whatever its own exit code was to be. A thread that sleeps in a
    signal handler does not come back. One that is not asleep is left alone, since it may hold locks
    that the process needs on its way out.
    """
    if thread.ident is None or not _sleeps(thread):
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(_SIGNAL, ctypes.cast(libc.pause, ctypes.c_void_p))
    signal.pthread_kill(thread.ident, _SIGNAL)


def _sleeps(thread: threading.Thread) -> bool:
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:  # it has just ended
        return False
    return stat.rpartition(")")[2].split()[0] == "S"
