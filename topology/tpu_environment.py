"""The variables that make libtpu give one device to each process; to be set before it loads.

Sources: torch_xla's configure_topology and jax's test_multiprocess table; for several slices jax's
cloud_tpu_cluster.py and kuberay's webhook (MEGASCALE_PORT).
"""

from __future__ import annotations

from tpu_dist.topology.discovery import Place
from tpu_dist.topology.errors import TopologyError

BASE_PORT = 8476  # open in the default firewall of TPU VMs
MEGASCALE_BASE_PORT = 8081

# What may be left in an environment of another slice, host or start, and would be believed.
AMBIENT = frozenset(
    {
        "TPU_CHIPS_PER_PROCESS_BOUNDS",
        "TPU_PROCESS_BOUNDS",
        "TPU_CHIPS_PER_HOST_BOUNDS",
        "TPU_HOST_BOUNDS",
        "TPU_PROCESS_ADDRESSES",
        "TPU_PROCESS_PORT",
        "CLOUD_TPU_TASK_ID",
        "TPU_VISIBLE_CHIPS",
        "TPU_VISIBLE_DEVICES",
        "TPU_WORKER_ID",
        "TPU_WORKER_HOSTNAMES",
        "MEGASCALE_COORDINATOR_ADDRESS",
        "MEGASCALE_NUM_SLICES",
        "MEGASCALE_SLICE_ID",
        "MEGASCALE_PORT",
    }
)


def tpu_environment(place: Place, *, local_rank: int, local_world_size: int) -> dict[str, str]:
    """Return the variables for process `local_rank` of a host that runs one process per device.

    A pure function of where the host stands and where its peers are.

    Raises:
        TopologyError: the host has another number of devices than it runs processes, or nothing
            says where the other hosts are.
    """
    slice_ = place.system.slice
    if local_world_size != slice_.devices_per_host:
        raise TopologyError(
            f"this host has {slice_.devices_per_host} TPU devices, and {local_world_size} "
            f"processes were started on it; tpu_dist runs one process per device. Start "
            f"{slice_.devices_per_host} (tpu-launch --nproc-per-node auto), or hide chips from it."
        )
    if not 0 <= local_rank < local_world_size:
        raise TopologyError(
            f"LOCAL_RANK is {local_rank}, outside of the {local_world_size} processes of this host."
        )
    hostnames = place.hostnames or ("localhost",)
    if len(hostnames) != slice_.num_hosts:
        raise TopologyError(
            f"{slice_} has {slice_.num_hosts} hosts, and nothing says where they are. Set "
            f"TPU_WORKER_HOSTNAMES to all of them, in the order of TPU_WORKER_ID."
        )
    bounds = list(slice_.shape)
    if slice_.generation.devices_per_chip > 1:
        bounds.append(slice_.generation.devices_per_chip)
    addresses = [
        f"{_bracketed(host)}:{BASE_PORT + local}"
        for host in hostnames
        for local in range(local_world_size)
    ]
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": ",".join(map(str, bounds)),
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
        "TPU_PROCESS_PORT": str(BASE_PORT + local_rank),
        "CLOUD_TPU_TASK_ID": str(place.host * local_world_size + local_rank),
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        **_of_several_slices(place, local_rank),
    }


def host_environment(place: Place) -> dict[str, str]:
    """Return what says where a host stands, for whoever finds out by `discovery` in a worker."""
    if place.system.slice.num_hosts == 1:
        return {"TPU_WORKER_ID": "0"}
    return {
        "TPU_WORKER_ID": str(place.host),
        "TPU_WORKER_HOSTNAMES": ",".join(place.hostnames),
    }


def _of_several_slices(place: Place, local_rank: int) -> dict[str, str]:
    if place.system.num_slices == 1:
        return {}
    if place.coordinator is None:
        raise TopologyError(
            f"the job has {place.system.num_slices} slices, and nothing says who joins them. Set "
            f"MEGASCALE_COORDINATOR_ADDRESS to the first host of the first slice."
        )
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": place.coordinator,
        "MEGASCALE_NUM_SLICES": str(place.system.num_slices),
        "MEGASCALE_SLICE_ID": str(place.slice_index),
        "MEGASCALE_PORT": str(MEGASCALE_BASE_PORT + local_rank),
    }


def _bracketed(host: str) -> str:
    """Write an IPv6 address as it is written before a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
