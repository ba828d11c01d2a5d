"""The variables that make libtpu give one device to each process; to be set before it loads.

Sources: torch_xla's configure_topology and jax's test_multiprocess table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_dist.topology.errors import TopologyError

BASE_PORT = 8476  # open in the default firewall of TPU VMs

Bounds = tuple[int, int, int]

# How the chips of one host stand, by their number. 8 chips: v5e and v6e hosts are 2x4.
_HOST_GRIDS: Mapping[int, Bounds] = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where this host stands in its slice."""

    num_chips: int
    devices_per_chip: int = 1
    host_bounds: Bounds = (1, 1, 1)
    worker_id: int = 0
    hostnames: Sequence[str] = ("localhost",)

    @property
    def num_devices(self) -> int:
        """Processes that this host must run: one per device."""
        return self.num_chips * self.devices_per_chip


def read_host_place(
    environ: Mapping[str, str], *, num_chips: int, devices_per_chip: int
) -> HostPlace:
    """Read the slice's shape from the variables that GKE and the TPU VM set.

    Raises:
        TopologyError: they contradict each other.
    """
    hostnames = tuple(
        name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name
    ) or ("localhost",)
    bounds_text = environ.get("TPU_HOST_BOUNDS") or environ.get("TPU_PROCESS_BOUNDS") or "1,1,1"
    worker_text = environ.get("TPU_WORKER_ID") or environ.get("CLOUD_TPU_TASK_ID") or "0"
    if len(hostnames) == 1:
        return HostPlace(num_chips=num_chips, devices_per_chip=devices_per_chip)
    try:
        parts = [int(part) for part in bounds_text.split(",")]
        worker_id = int(worker_text)
        x, y, z = parts[:3]
    except ValueError:
        raise TopologyError(
            f"the slice's shape cannot be read: TPU_HOST_BOUNDS={bounds_text!r}, "
            f"TPU_WORKER_ID={worker_text!r}. Want three integers such as 2,2,1, and an index."
        ) from None
    if x * y * z != len(hostnames) or not 0 <= worker_id < len(hostnames):
        raise TopologyError(
            f"TPU_WORKER_HOSTNAMES lists {len(hostnames)} hosts, but TPU_HOST_BOUNDS={bounds_text} "
            f"is a grid of {x * y * z} and TPU_WORKER_ID is {worker_id}. One of them is left over "
            f"from another slice: unset or correct it."
        )
    return HostPlace(
        num_chips=num_chips,
        devices_per_chip=devices_per_chip,
        host_bounds=(x, y, z),
        worker_id=worker_id,
        hostnames=hostnames,
    )


def tpu_environment(place: HostPlace, *, local_rank: int, local_world_size: int) -> dict[str, str]:
    """Return the variables for process `local_rank` of a host that runs one process per device.

    Raises:
        TopologyError: the host has another number of devices than it runs processes.
    """
    if local_world_size != place.num_devices:
        raise TopologyError(
            f"this host has {place.num_devices} TPU devices, and {local_world_size} processes were "
            f"started on it; tpu_dist runs one process per device. Start {place.num_devices} "
            f"(tpu-launch --nproc-per-node auto), or hide chips from it."
        )
    if not 0 <= local_rank < local_world_size:
        raise TopologyError(
            f"LOCAL_RANK is {local_rank}, outside of the {local_world_size} processes of this host."
        )
    try:
        grid = _HOST_GRIDS[place.num_chips]
    except KeyError:
        raise TopologyError(
            f"a host with {place.num_chips} chips is not known; known are "
            f"{', '.join(map(str, _HOST_GRIDS))} chips."
        ) from None
    bounds = [str(h * c) for h, c in zip(place.host_bounds, grid, strict=True)]
    if place.devices_per_chip > 1:
        bounds.append(str(place.devices_per_chip))
    addresses = [
        f"{host}:{BASE_PORT + local}"
        for host in place.hostnames
        for local in range(local_world_size)
    ]
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": ",".join(bounds),
        "TPU_PROCESS_ADDRESSES": ",".join(addresses),
        "TPU_PROCESS_PORT": str(BASE_PORT + local_rank),
        "CLOUD_TPU_TASK_ID": str(place.worker_id * local_world_size + local_rank),
        "TPU_VISIBLE_CHIPS": str(local_rank),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
