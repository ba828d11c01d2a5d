"""What one job runs on: a slice, or several of one shape joined over the data-centre network."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_dist.topology.accelerator_types import is_accelerator_type, parse_accelerator_type
from tpu_dist.topology.coordinates import Device, Rank
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.slice import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One slice, or several alike joined over DCN; ranks go slice by slice.

    Attributes:
        slice: what each slice is.
        num_slices: how many there are.

    Example:
        >>> System.parse("v6e:16x16*4").num_devices
        1024
        >>> str(System.parse("v5p-128"))
        'v5p:4x4x4'
    """

    slice: Slice
    num_slices: int = 1

    def __post_init__(self) -> None:
        if self.num_slices < 1:
            raise ValueError(f"num_slices must be at least 1, got {self.num_slices}")

    @classmethod
    def parse(cls, text: str, *, chips_per_host: int | None = None) -> System:
        """Read ``tpu7x:4x4x8``, ``v5p-128``, or either with ``*N`` for N such slices.

        Raises:
            TopologyError: no such generation, shape or accelerator type.
        """
        match = re.fullmatch(r"\s*([^*\s]+?)\s*(?:\*\s*(\d{1,6}))?\s*", text)
        if match is None or match[2] == "0" * len(match[2] or ""):
            raise TopologyError(
                f"{text!r} names no slices: give one as in tpu7x:4x4x8 or v5p-128, and *4 for four."
            )
        name = match[1]
        if is_accelerator_type(name):
            slice_ = parse_accelerator_type(name, chips_per_host=chips_per_host)
        else:
            slice_ = Slice.parse(name, chips_per_host=chips_per_host)
        return cls(slice=slice_, num_slices=int(match[2] or 1))

    def __str__(self) -> str:
        return str(self.slice) if self.num_slices == 1 else f"{self.slice}*{self.num_slices}"

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return self.slice.num_chips * self.num_slices

    @property
    def num_devices(self) -> int:
        """Devices, and ranks, of all slices."""
        return self.slice.num_devices * self.num_slices

    @property
    def num_hosts(self) -> int:
        """Hosts of all slices."""
        return self.slice.num_hosts * self.num_slices

    def rank_of(self, device: Device) -> Rank:
        """Return a device's rank.

        Raises:
            TopologyError: there is no such device.
        """
        if not 0 <= device.slice_index < self.num_slices:
            raise TopologyError(f"{self} has no slice {device.slice_index}.")
        first = device.slice_index * self.slice.num_devices
        return Rank(first + self.slice.rank_of(device.coord, device.core))

    def device_at(self, rank: int) -> Device:
        """Return the device of a rank; the inverse of rank_of.

        Raises:
            TopologyError: there is no such rank.
        """
        if not 0 <= rank < self.num_devices:
            raise TopologyError(f"{self} has {self.num_devices} devices, and none of rank {rank}.")
        index, within = divmod(rank, self.slice.num_devices)
        return self.slice.device_at(within)._replace(slice_index=index)
