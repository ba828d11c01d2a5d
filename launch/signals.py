"""The signals that end a run: taken once, at a safe moment, and a second one means now."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    """A signal asks the launcher to end.

    Not an Exception, as KeyboardInterrupt is none: code between that catches Exception
    (torchelastic's exit barrier does) must let it through.
    """

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class EndingSignals:
    """Owns the handlers of the ending signals while a run lasts; for the main thread, with `with`.

    The first signal raises `Interrupted` where the launcher is, so that any wait ends at once, but
    not within ``held``: there it waits until the end of it. From the second on, ``again`` is
    called instead, from the handler, and nothing is raised.

    A signal that was ignored when the launcher started (SIGHUP under nohup) stays ignored.
    """

    def __init__(self, again: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._again = again
        self._raised = False
        self._holds = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> EndingSignals:
        for signum in HANDLED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the first signal from raising inside; it raises at the end of the outermost."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._raise_once()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self._again()
            return
        self.received = signal.Signals(signum)
        self._raise_once()

    def _raise_once(self) -> None:
        if self.received is not None and not self._raised and not self._holds:
            self._raised = True
            raise Interrupted(self.received)
