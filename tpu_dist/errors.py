"""The errors that users of tpu_dist may catch."""

from tpu_dist.topology.errors import (
    BringUpError,
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
    TopologyError,
    TpuDistError,
    UnsupportedError,
)

__all__ = [
    "BringUpError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "MismatchError",
    "PeerLostError",
    "TopologyError",
    "TpuDistError",
    "UnsupportedError",
]
