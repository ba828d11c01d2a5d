"""How long each collective verb took, where the process group says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class VerbTime(Protocol):
    """What a process group reports of one verb, since it was made."""

    @property
    def calls(self) -> int:
        """Times called."""
        ...

    @property
    def seconds(self) -> float:
        """Time spent in all of them."""
        ...


@runtime_checkable
class TimesVerbs(Protocol):
    """A process group that reports its verbs' times; an optional method, found by its name."""

    def verb_times(self) -> Mapping[str, VerbTime]:
        """Calls and time of each verb so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbLap:
    """Calls and time of one verb between two looks."""

    calls: int
    seconds: float


class VerbClock:
    """Differences of a group's verb times from one lap to the next."""

    def __init__(self, group: object) -> None:
        self._group = group if isinstance(group, TimesVerbs) else None
        self._before = self._read()

    def lap(self) -> Mapping[str, VerbLap] | None:
        """Verbs called since the last lap, the costliest first; None where the group has none."""
        if self._group is None:
            return None
        before, self._before = self._before, self._read()
        nothing = VerbLap(calls=0, seconds=0.0)
        laps = {
            verb: VerbLap(
                calls=now.calls - before.get(verb, nothing).calls,
                seconds=now.seconds - before.get(verb, nothing).seconds,
            )
            for verb, now in self._before.items()
        }
        called = {verb: lap for verb, lap in laps.items() if lap.calls > 0}
        return dict(sorted(called.items(), key=lambda item: -item[1].seconds))

    def _read(self) -> Mapping[str, VerbLap]:
        if self._group is None:
            return {}
        # Copied: a group may hand out the objects that it goes on adding to.
        return {
            verb: VerbLap(calls=time.calls, seconds=time.seconds)
            for verb, time in self._group.verb_times().items()
        }
