"""Streams and events, of a device that runs everything in the order of its data.

PJRT orders programs by the arrays they share, so a stream has nothing to order, and waiting for one
is waiting for what is under way. An event is reached when nothing is under way that was when it was
recorded. To look through the device's arrays for that takes time, so only timed events do; others
stand for all that is under way when they are asked, which is later, never sooner.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tpu_dist.runtime.device import calls
from tpu_dist.runtime.device.place import is_started, place

Array = Any


def arrays_under_way() -> list[Array]:
    """The device's arrays that are not computed yet."""
    if not is_started():
        return []
    client = place().device.client
    return [a for a in client.live_arrays() if not a.is_deleted() and not a.is_ready()]


def wait_for(arrays: list[Array]) -> None:
    """Block until these are computed, or given up."""
    for array in arrays:
        if not array.is_deleted():
            # Donated meanwhile: whoever took it is waited for by its own result.
            with contextlib.suppress(RuntimeError):
                array.block_until_ready()


def synchronize(device: Any = None) -> None:
    """Block until all that was called is computed, collectives among it.

    Raises:
        IndexError, RuntimeError: an operator has found its input to be wrong.
        CollectiveError: a collective has failed, and nobody has seen that yet.
    """
    from tpu_dist.runtime.device.checks import raise_pending

    calls.settle_all()
    wait_for(arrays_under_way())
    raise_pending()


class Stream(torch.Stream):
    """A queue of work. All are one: see the module."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Make one; its priority is of no consequence."""
        return super().__new__(cls, device=torch.device("tpu", 0), priority=priority)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Order what comes behind what `stream` has; it is so anyway."""

    def wait_event(self, event: torch.Event) -> None:
        """Order what comes behind what `event` stands for; it is so anyway."""

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, here."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block until all that was called is computed."""
        synchronize()

    def query(self) -> bool:
        """Whether all that was called is computed."""
        return not calls.under_way() and not arrays_under_way()


class Event(torch.Event):
    """A point in the order of calls."""

    _under_way: list[Array]
    _calls: list[calls.WritingCall]
    _ended: float | Future[float] | None
    _timed: bool
    _recorded: bool

    def __new__(cls, enable_timing: bool = False, **kwargs: Any) -> Event:
        """Make one, not recorded yet.

        Args:
            enable_timing: whether elapsed_time() will be asked for.
            **kwargs: what other backends' events have: blocking, interprocess.
        """
        event = super().__new__(cls, device=torch.device("tpu", 0), enable_timing=enable_timing)
        event._under_way = []
        event._calls = []
        event._ended = None
        event._timed = enable_timing
        event._recorded = False
        return event

    def record(self, stream: Any = None) -> None:
        """Stand for what has been called until now."""
        self._recorded = True
        if self._timed:
            self._under_way = arrays_under_way()
            self._calls = calls.under_way()
            self._ended = time.perf_counter()
            if self._under_way or self._calls:
                self._ended = _clock().submit(_time_of, self._under_way, self._calls)

    def wait(self, stream: Any = None) -> None:
        """Order what `stream` gets behind it; it is so anyway."""

    def query(self) -> bool:
        """Whether what it stands for is computed."""
        if not self._timed and self._recorded:
            return not calls.under_way() and not arrays_under_way()
        if any(not call.is_completed() for call in self._calls):
            return False
        return all(a.is_deleted() or a.is_ready() for a in self._under_way)

    def synchronize(self) -> None:
        """Block until what it stands for is computed."""
        if self._recorded:
            for call in self._calls if self._timed else calls.under_way():
                call.settle()
            wait_for(self._under_way if self._timed else arrays_under_way())
        self._under_way = []
        self._calls = []

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from when this was reached to when `end_event` was; waits for both.

        Raises:
            ValueError: one was not recorded, or was made without enable_timing=True.
        """
        first, last = self._time(), end_event._time()  # type: ignore[attr-defined]
        return (last - first) * 1e3  # type: ignore[no-any-return]

    def _time(self) -> float:
        if not self._timed or self._ended is None:
            raise ValueError(
                "elapsed_time needs two events that were made with enable_timing=True and "
                "recorded; this one was "
                + ("not recorded." if self._timed else "made without enable_timing=True.")
            )
        return self._ended.result() if isinstance(self._ended, Future) else self._ended


def _time_of(arrays: list[Array], collectives: list[calls.WritingCall]) -> float:
    for call in collectives:
        call.join()
    wait_for(arrays)
    return time.perf_counter()


_clocks: list[ThreadPoolExecutor] = []


def _clock() -> ThreadPoolExecutor:
    """The thread that sees when timed events are reached; several wait beside each other."""
    if not _clocks:
        _clocks.append(ThreadPoolExecutor(max_workers=8, thread_name_prefix="tpu_dist-events"))
    return _clocks[0]


class _Current(threading.local):
    stream: Stream | None = None


_default: list[Stream] = []
_current = _Current()


def default_stream(device: Any = None) -> Stream:
    """The stream that work goes to where none is chosen."""
    if not _default:
        _default.append(Stream())
    return _default[0]


def current_stream(device: Any = None) -> Stream:
    """The stream of this thread."""
    return _current.stream or default_stream()


def set_stream(stream: Any) -> None:
    """Choose this thread's stream; None leaves it as it is."""
    if stream is not None:
        _current.stream = stream


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[None]:
    """Choose this thread's stream for the length of the block."""
    before = _current.stream
    set_stream(chosen)
    try:
        yield
    finally:
        _current.stream = before
