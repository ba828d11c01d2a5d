"""The flight recorder: the calls of this process, the last ones whole, all of them in sums."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_dist.collectives.task import Call

LENGTH = 2000  # calls that are kept, about 1 MB


@dataclass(slots=True)
class Record:
    """One call.

    Attributes:
        started: time.time() at the call.
        seconds: until it ended; None while it is under way.
        error: what it failed with, in words.
    """

    call: Call
    started: float
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class VerbTime:
    """What one verb has taken so far: from the call to its end, waiting for peers included."""

    calls: int
    seconds: float


class Recorder:
    """Thread-safe."""

    def __init__(self) -> None:
        self._records: collections.deque[Record] = collections.deque(maxlen=LENGTH)
        self._times: dict[str, VerbTime] = {}
        self._lock = threading.Lock()

    def begin(self, call: Call) -> Record:
        """Note that a call was made."""
        record = Record(call, time.time())
        self._records.append(record)
        return record

    def end(self, record: Record, seconds: float, error: BaseException | None) -> None:
        """Note that it has ended."""
        record.seconds = seconds
        record.error = None if error is None else str(error)
        with self._lock:
            so_far = self._times.get(record.call.verb, VerbTime(0, 0.0))
            self._times[record.call.verb] = VerbTime(so_far.calls + 1, so_far.seconds + seconds)

    def verb_times(self) -> Mapping[str, VerbTime]:
        """Calls and seconds for each verb since the start."""
        with self._lock:
            return dict(self._times)

    def records(self) -> list[Record]:
        """The last calls, oldest first."""
        return list(self._records)
