"""Keeping freed host memory, so that the next program's buffers need no new pages."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEPT_BYTES = 512 << 20  # what malloc may hold back at the top of a heap
_MAPPED_BYTES = 32 << 20  # larger blocks are mapped and unmapped one by one: glibc's own maximum


def keep_freed_memory() -> None:
    """Have malloc give memory back to the kernel later than it does.

    On the CPU platform a program allocates its buffers anew in each call, on threads of the
    client's. glibc adapts only after many calls, and again whenever the sizes change: until then an
    all_reduce of 16 MiB on 4 ranks took 4,000 page faults, a third of its time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
