"""tpu_dist: PyTorch's distributed training on TPU pods, over XLA collectives.

`import torch` makes the backend known by itself. Importing this package does too, for those who
turn torch's autoload off; it has no other effect. What it exports are init_device_mesh and the
errors to catch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "BringUpError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "MismatchError",
    "PeerLostError",
    "TopologyError",
    "TpuDistError",
    "UnsupportedError",
    "init_device_mesh",
]


def init_device_mesh(
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    device_type: str | None = None,
    topology: str | None = None,
    traffic: Sequence[float] | None = None,
    lockstep: bool = False,
) -> DeviceMesh:
    """Return a DeviceMesh whose axes stand where the slice has the most links.

    torch's init_device_mesh gives place i of the mesh to rank i, wherever that rank's device is.
    Here each axis's groups are rings, planes or blocks of the slice, the innermost axis first, and
    slices are joined by the outermost. On the CPU stand-in, where no device has a place, it is
    torch's order, unless `topology` says otherwise. Collective over all ranks; starts the default
    group where there is none.

    Args:
        mesh_shape: sizes, the outermost axis first; their product is the number of ranks.
        mesh_dim_names: names of the axes.
        device_type: of the mesh; default: where tensors live, "tpu" or "cpu".
        topology: the slice or slices, as in ``tpu7x:4x4x8*2``; on the stand-in the ranks stand for
            its devices, row-major. On a TPU it is measured, and need not be given.
        traffic: how many bytes each axis gathers, relative to the others; default: four times
            those of the axis outside of it.
        lockstep: a promise that every rank makes the same calls, in the same order, on its group
            of an axis, as SPMD training does: then the groups of an axis run as one program, which
            has more links, and which parts of a v5e or v6e slice cannot do without. A rank that
            does not keep it makes the calls of all fail, with its name. False for pipelines, and
            for whatever else calls some groups of an axis alone.

    Raises:
        UnsupportedError: lockstep, where nobody knows how the ranks stand in a slice.
        TopologyError: mesh, topology and ranks do not fit each other.
        BringUpError: the default group is on another backend.

    Example:
        >>> mesh = init_device_mesh((16, 8), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
    """
    from tpu_dist._device_mesh import create_device_mesh

    return create_device_mesh(
        mesh_shape,
        mesh_dim_names=mesh_dim_names,
        device_type=device_type,
        topology=topology,
        traffic=traffic,
        lockstep=lockstep,
    )


# Where torch is yet to be imported, it registers us at the end of that: what does not need it,
# like `tpu-launch --help`, need not wait for it.
if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    _autoload.register()
