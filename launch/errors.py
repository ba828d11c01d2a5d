"""What the launcher raises."""

from __future__ import annotations

from tpu_dist.topology.errors import TpuDistError


class LaunchError(TpuDistError):
    """A run cannot be started as it was asked for; found out before any worker exists."""


class RendezvousError(TpuDistError):
    """The hosts of a run could not find each other, or have lost each other for good."""
