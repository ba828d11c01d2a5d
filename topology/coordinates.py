"""Where a chip and a device sit: coordinates, and the numbers that name ranks and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

Rank = NewType("Rank", int)
"""A device's place among all devices of the job; also the rank of the process that drives it."""

HostId = NewType("HostId", int)
"""A host's place among the hosts of its slice: TPU_WORKER_ID, x fastest."""

AXIS_NAMES = ("x", "y", "z")


class Coord(NamedTuple):
    """A chip's coordinates in its slice; z is 0 where the torus has two axes."""

    x: int
    y: int
    z: int = 0

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Shape(NamedTuple):
    """An extent in chips along x, y and z; z is 1 where the torus has two axes."""

    x: int
    y: int
    z: int = 1

    @property
    def volume(self) -> int:
        """Chips in a block of this shape."""
        return self.x * self.y * self.z

    def times(self, other: Shape) -> Shape:
        """Multiply axis by axis: hosts times the chips of one are the slice."""
        return Shape(*(a * b for a, b in zip(self, other, strict=True)))

    def fits_into(self, other: Shape) -> bool:
        """Whether `other` can be cut into blocks of this shape."""
        return all(b % a == 0 for a, b in zip(self, other, strict=True))

    def divided_by(self, other: Shape) -> Shape:
        """Return how many blocks of shape `other` stand along each axis; `other` fits."""
        return Shape(*(a // b for a, b in zip(self, other, strict=True)))


class Device(NamedTuple):
    """One device of a job: its slice, its chip, and which of the chip's devices it is."""

    slice_index: int
    coord: Coord
    core: int

    def __str__(self) -> str:
        place = f"{self.coord} core {self.core}"
        return place if self.slice_index == 0 else f"slice {self.slice_index} {place}"


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as people write it: 4x4x8."""
    return "x".join(map(str, shape))
