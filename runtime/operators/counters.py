"""What has happened in this process that should not happen in a loop."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Counts since the start of the process, or the last reset().

    Attributes:
        fallbacks: operators that ran on the CPU, by name.
        programs: XLA programs compiled.
    """

    fallbacks: collections.Counter[str] = field(default_factory=collections.Counter)
    programs: int = 0

    def reset(self) -> None:
        """Start again."""
        self.fallbacks.clear()
        self.programs = 0


COUNTERS = Counters()
