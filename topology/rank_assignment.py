"""Which ranks a host's processes get, so that torch's own init_device_mesh lays a mesh out well.

For a launcher: it knows the system, the mesh that the script will make, and the hosts; what it
hands out is a table of ranks. Where no mesh is known it is the compiler's order, row-major over
(x, y, z, core), slice by slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.rank_map import Numbers, RankMap, host_places
from tpu_dist.topology.system import System


def assign_ranks(
    system: System,
    mesh_shape: Sequence[int] | None = None,
    *,
    traffic: Sequence[float] | None = None,
) -> Numbers:
    """Return the rank of each process; a pure function, the same on every host.

    Args:
        system: what the job runs on.
        mesh_shape: the sizes that the script will give init_device_mesh, the outermost first; None
            if that is not known.
        traffic: as in `lay_out_mesh`.

    Returns:
        Ranks by host, counted through all slices, and by local rank: [hosts, devices of a host].

    Raises:
        TopologyError: the mesh does not fit.

    Example:
        >>> assign_ranks(System.parse("v6e:2x2"), (2, 2)).tolist()
        [[0, 2, 1, 3]]
    """
    rank_map = RankMap.row_major(system)
    if mesh_shape is not None:
        rank_map = lay_out_mesh(system, mesh_shape, traffic=traffic).rank_map()
    hosts, locals_ = host_places(system)
    table = np.empty((system.num_hosts, system.slice.devices_per_host), np.int64)
    table[hosts, locals_] = rank_map.ranks()
    return table
