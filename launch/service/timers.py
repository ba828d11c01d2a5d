"""Named clocks of an event loop: one of each name at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    """Calls something later, unless stopped or started anew before; for one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def now(self) -> float:
        """Return the loop's time in seconds."""
        return self._loop.time()

    def start(self, name: str, seconds: float, then: Callable[[], object]) -> None:
        """Call `then` in so many seconds."""
        self.stop(name)

        def ring() -> None:
            del self._handles[name]
            then()

        self._handles[name] = self._loop.call_later(seconds, ring)

    def stop(self, *names: str) -> None:
        """Stop those that run."""
        for name in names:
            handle = self._handles.pop(name, None)
            if handle is not None:
                handle.cancel()

    def stop_all(self) -> None:
        """Stop all that run."""
        self.stop(*list(self._handles))

    def __contains__(self, name: str) -> bool:
        return name in self._handles
