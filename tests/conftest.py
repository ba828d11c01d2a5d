"""What all tests share."""

from hypothesis import HealthCheck, settings

# A busy machine is slow: hypothesis must not call that a fault.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")
