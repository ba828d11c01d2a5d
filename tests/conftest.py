"""What all tests share."""

import signal

from hypothesis import HealthCheck, settings

# A busy machine is slow: hypothesis must not call that a fault.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

# A shell ignores these for what it runs in the background, and processes inherit that: tests that
# send them to processes of theirs would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
