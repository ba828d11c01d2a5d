"""How much of the device's memory is used: PJRT's own numbers, where it has any.

The CPU stand-in has none. There the arrays that are alive are counted; a peak is the most that was
seen at a look, and every question here is one.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from typing import Any

from tpu_dist.runtime.device.place import is_started, on_forget, place


class _Seen:
    """The highest counts since the last reset: of the stand-in, and what PJRT's peak was then."""

    peak = 0
    peak_at_reset = 0


_seen = _Seen()


@on_forget
def _forget() -> None:
    _seen.peak = _seen.peak_at_reset = 0


def _numbers() -> tuple[int, int, int, int]:
    """Bytes in use, at the peak, reserved by others than arrays, and there are at all."""
    if not is_started():
        return 0, 0, 0, 0
    device = place().device
    stats = device.memory_stats()
    if stats:
        used, peak = int(stats["bytes_in_use"]), int(stats.get("peak_bytes_in_use", 0))
        # PJRT's peak is never reset: until it grows, the peak since ours is what is seen.
        if peak <= _seen.peak_at_reset:
            _seen.peak = max(_seen.peak, used)
            peak = _seen.peak
        reserved = int(stats.get("bytes_reserved", 0))
        return used, peak, reserved, int(stats.get("bytes_limit", 0))
    used = sum(a.nbytes for a in device.client.live_arrays() if not a.is_deleted())
    _seen.peak = max(_seen.peak, used)
    return used, _seen.peak, 0, 0


def memory_allocated(device: Any = None) -> int:
    """Bytes of the arrays that are alive."""
    return _numbers()[0]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were in use since the start, or reset_peak_memory_stats()."""
    return _numbers()[1]


def memory_reserved(device: Any = None) -> int:
    """Bytes that are not to be had by others: those in use; PJRT keeps no cache of free ones."""
    used, _, reserved, _ = _numbers()
    return used + reserved


def max_memory_reserved(device: Any = None) -> int:
    """The most that memory_reserved() was."""
    _, peak, reserved, _ = _numbers()
    return peak + reserved


def total_memory() -> int:
    """Bytes that the device has; on the stand-in, those of the machine."""
    limit = _numbers()[3]
    if limit or not is_started() or place().platform != "cpu":
        return limit
    import resource
    from pathlib import Path

    found = Path("/proc/meminfo")
    if found.exists():
        return int(found.read_text().split()[1]) * 1024
    return resource.getpagesize()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and that there are."""
    total = total_memory()
    return total - memory_reserved(), total


def reset_peak_memory_stats(device: Any = None) -> None:
    """Count peaks from here."""
    used, _, _, _ = _numbers()
    _seen.peak = used
    if is_started():
        stats = place().device.memory_stats()
        _seen.peak_at_reset = int(stats.get("peak_bytes_in_use", 0)) if stats else 0


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """PJRT accumulates nothing: there is nothing to reset."""


def empty_cache() -> None:
    """Let go of tensors that only wait for Python's collector; PJRT has no cache to empty."""
    gc.collect()


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """Those of torch.cuda.memory_stats() that mean something here."""
    used, peak, reserved, limit = _numbers()
    stats: dict[str, int] = {"num_alloc_retries": 0, "num_ooms": 0, "bytes_limit": limit}
    for name, (current, most) in {
        "active_bytes": (used, peak),
        "allocated_bytes": (used, peak),
        "reserved_bytes": (used + reserved, peak + reserved),
    }.items():
        stats[f"{name}.all.current"] = current
        stats[f"{name}.all.peak"] = most
    return OrderedDict(sorted(stats.items()))
