"""Which rank drives which device: the orders that there are, as tables for a whole system at once.

A device's number is its rank in the compiler's order: slice by slice, row-major over (x, y, z,
core). A RankMap says which device each rank has; where the ranks come in that order it is the
identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tpu_dist.topology.coordinates import Device, Rank
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.system import System

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMap:
    """Which device each rank of a job drives, and where it is.

    Attributes:
        system: what the job runs on.
        devices: the number of each rank's device, by rank.

    Example:
        >>> RankMap.host_major(System.parse("v5p:2x2x2")).devices.tolist()
        [0, 4, 2, 6, 1, 5, 3, 7]
    """

    system: System
    devices: Numbers

    def __post_init__(self) -> None:
        count = self.system.num_devices
        if self.devices.shape != (count,) or not np.array_equal(
            np.sort(self.devices), np.arange(count)
        ):
            raise TopologyError(
                f"{self.system} has {count} devices, and each needs its rank; "
                f"{self.devices.size} ranks were given, with "
                f"{np.unique(self.devices).size} different devices."
            )

    @classmethod
    def row_major(cls, system: System) -> RankMap:
        """Return the compiler's order: slice by slice, row-major over (x, y, z, core)."""
        return cls(system=system, devices=np.arange(system.num_devices))

    @classmethod
    def host_major(cls, system: System) -> RankMap:
        """Return torchrun's order: host by host as libtpu numbers them, then by local rank."""
        hosts, locals_ = host_places(system)
        return cls(system=system, devices=np.lexsort((locals_, hosts)))

    @classmethod
    def of_devices(cls, system: System, devices: Sequence[Device]) -> RankMap:
        """Return the map of a job whose rank r drives ``devices[r]``.

        Raises:
            TopologyError: a device is none of the system's, has two ranks or has none.
        """
        return cls(system=system, devices=np.array([system.rank_of(d) for d in devices], np.int64))

    def rank_of(self, device: Device) -> Rank:
        """Return the rank that drives a device."""
        return Rank(int(self.ranks()[self.system.rank_of(device)]))

    def device_of(self, rank: int) -> Device:
        """Return the device that a rank drives."""
        return self.system.device_at(int(self.devices[rank]))

    def ranks(self) -> Numbers:
        """Return the rank of each device, by the device's number."""
        ranks = np.empty_like(self.devices)
        ranks[self.devices] = np.arange(self.devices.size)
        return ranks

    def hosts(self) -> Numbers:
        """Return the host of each rank, counted through all slices."""
        return host_places(self.system)[0][self.devices]

    def local_ranks(self) -> Numbers:
        """Return each rank's place among the devices of its host."""
        return host_places(self.system)[1][self.devices]


def coordinates(system: System) -> Numbers:
    """Return (slice, x, y, z, core) of every device, by its number: shape [devices, 5]."""
    shape = (system.num_slices, *system.slice.shape, system.slice.generation.devices_per_chip)
    return np.stack(np.unravel_index(np.arange(system.num_devices), shape), axis=1)


def host_places(system: System) -> tuple[Numbers, Numbers]:
    """Return the host of every device, counted through all slices, and its place on that host."""
    slice_ = system.slice
    index, x, y, z, core = coordinates(system).T
    grid, bounds = slice_.host_grid, slice_.host_bounds
    host = ((z // grid.z) * bounds.y + y // grid.y) * bounds.x + x // grid.x
    chip = ((z % grid.z) * grid.y + y % grid.y) * grid.x + x % grid.x
    return index * slice_.num_hosts + host, chip * slice_.generation.devices_per_chip + core
