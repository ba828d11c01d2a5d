"""EndingSignals: one Interrupted, at a safe moment, and each further signal means now."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tpu_dist.launch.signals import HANDLED, EndingSignals, Interrupted

TEST_SIGNAL = signal.SIGHUP  # none that pytest or a terminal sends


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = [signal.signal(signum, signal.SIG_DFL) for signum in HANDLED]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(TEST_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    for signum, handler in zip(HANDLED, before, strict=True):
        signal.signal(signum, handler)


def send() -> None:
    os.kill(os.getpid(), TEST_SIGNAL)


def test_the_first_signal_raises_at_once() -> None:
    with pytest.raises(Interrupted) as caught, EndingSignals(again=pytest.fail) as signals:
        send()
        pytest.fail("went on")
    assert caught.value.signum == signals.received == TEST_SIGNAL


def test_within_held_it_waits_for_the_end_of_the_outermost() -> None:
    reached = []
    with EndingSignals(again=pytest.fail) as signals:
        with pytest.raises(Interrupted), signals.held():
            with signals.held():
                send()
                reached.append("inner")
            reached.append("outer")
        assert reached == ["inner", "outer"]
        with signals.held():  # it raises once
            pass


def test_later_signals_call_instead_of_raising() -> None:
    calls: list[str] = []
    with EndingSignals(again=lambda: calls.append("now")) as signals:
        with pytest.raises(Interrupted):
            send()
        with signals.held():
            send()
        send()
    assert calls == ["now", "now"]


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(TEST_SIGNAL, signal.SIG_IGN)
    with EndingSignals(again=pytest.fail) as signals:
        send()
    assert signals.received is None
    assert signal.getsignal(TEST_SIGNAL) is signal.SIG_IGN


def test_no_handler_of_exceptions_stops_it() -> None:
    with pytest.raises(Interrupted), EndingSignals(again=pytest.fail):
        try:
            send()
        except Exception:
            pytest.fail("swallowed")
