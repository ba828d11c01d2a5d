"""tpu_dist: PyTorch's distributed training on TPU pods, over XLA collectives.

`import torch` makes the backend known by itself. Importing this package does too, for those who
turn torch's autoload off; it has no other effect. What it exports are the errors to catch.
"""

import os
import sys

from tpu_dist import _autoload
from tpu_dist.errors import (
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

# Where torch is yet to be imported, it registers us at the end of that: what does not need it,
# like `tpu-launch --help`, need not wait for it.
if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    _autoload.register()
