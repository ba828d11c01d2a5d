"""What the TPU_* and MEGASCALE_* variables say: of GKE, of a TPU VM, or of whoever set them.

Sources: torch_xla's _internal/tpu.py (names and their older aliases), jax's cloud_tpu_cluster.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpu_dist.topology.claims import Claim, Description, combine
from tpu_dist.topology.coordinates import Shape
from tpu_dist.topology.source_texts import (
    read_accelerator,
    read_address,
    read_bounds,
    read_first,
    read_hostnames,
    read_int,
    read_topology,
    read_wrap,
)

SKIP_METADATA = "TPU_SKIP_MDS_QUERY"

# (grid of hosts or processes, grid of the chips of one): each pair multiplies to the slice.
_GRIDS = (
    ("TPU_HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"),
    ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"),
)


def describe_environment(environ: Mapping[str, str]) -> Description:
    """Return what the environment says of the slice and of this host.

    Raises:
        TopologyError: a variable cannot be read, or two contradict each other.
    """
    named = read_first(read_accelerator, environ, "TPU_ACCELERATOR_TYPE") or Description()
    shape, twisted = read_first(read_topology, environ, "TPU_TOPOLOGY") or (None, None)
    return combine(
        [
            Description(
                shape=shape,
                twisted=twisted,
                wrap=read_first(read_wrap, environ, "TPU_TOPOLOGY_WRAP"),
                host=read_first(read_int, environ, "TPU_WORKER_ID"),
                task=read_first(read_int, environ, "CLOUD_TPU_TASK_ID"),
                hostnames=read_first(read_hostnames, environ, "TPU_WORKER_HOSTNAMES"),
                num_slices=read_first(read_int, environ, "MEGASCALE_NUM_SLICES"),
                slice_index=read_first(read_int, environ, "MEGASCALE_SLICE_ID"),
                coordinator=read_first(read_address, environ, "MEGASCALE_COORDINATOR_ADDRESS"),
            ),
            Description(hostnames=read_first(read_hostnames, environ, "TPU_PROCESS_ADDRESSES")),
            *describe_grids(environ),
            named,
        ]
    )


def describe_grids(values: Mapping[str, str], prefix: str = "TPU_") -> list[Description]:
    """Return what grids of hosts, of processes and of their chips say.

    Args:
        values: text by name.
        prefix: what the names begin with, before HOST_BOUNDS and the others.

    Raises:
        TopologyError: a grid cannot be read.
    """
    found = []
    for outer_name, inner_name in _GRIDS:
        names = [prefix + name.removeprefix("TPU_") for name in (outer_name, inner_name)]
        outer = read_first(read_bounds, values, names[0])
        inner = read_first(read_bounds, values, names[1])
        is_of_hosts = outer_name == "TPU_HOST_BOUNDS"
        found.append(_of_hosts(outer, inner) if is_of_hosts else _of_processes(outer, inner))
        if outer and inner:
            origin = f"{outer.origin} times {inner.origin}"
            shape = Shape(*outer.value[:3]).times(Shape(*inner.value[:3]))
            found.append(Description(shape=Claim(shape, origin)))
    return found


def _of_hosts(
    outer: Claim[tuple[int, ...]] | None, inner: Claim[tuple[int, ...]] | None
) -> Description:
    return Description(
        host_bounds=Claim(Shape(*outer.value[:3]), outer.origin) if outer else None,
        chips_per_host=Claim(Shape(*inner.value[:3]).volume, inner.origin) if inner else None,
    )


def _of_processes(
    outer: Claim[tuple[int, ...]] | None, inner: Claim[tuple[int, ...]] | None
) -> Description:
    if outer is None:
        return Description()
    if inner is None:  # the newer name of a grid of hosts
        return Description(host_bounds=Claim(Shape(*outer.value[:3]), outer.origin))
    devices = outer.value[3] if len(outer.value) == 4 else 1
    count = Shape(*outer.value[:3]).volume * devices
    return Description(num_processes=Claim(count, outer.origin))
