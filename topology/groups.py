"""What the groups of one mesh axis look like in a slice, and how many links such a group can use.

The model, read from all_gather and all_reduce programs that libtpu 0.0.42 compiled for tpu7x 4x4x4:

- A group that spans whole axes of the slice gets a program that uses every link along them: 2 on a
  ring, 1 on a line or between two chips, added up over the axes.
- Any other group gets one ring through its members, walked in both directions: 2 links where the
  members can be walked so in steps of one, 1 where they are a segment of a line.
- Members that stand `stride` apart share the links between them with `stride` groups like theirs.
- A group with one device of each chip shares the links with the groups of the chip's others.

Latency, and the links between the devices of one chip, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tpu_dist.topology.coordinates import AXIS_NAMES
from tpu_dist.topology.links import num_links_along
from tpu_dist.topology.slice import Slice

CORE_AXIS = 3  # after x, y and z


class GroupKind(Enum):
    """How the chips of a group stand."""

    SINGLE = "one device"
    CORES = "the devices of one chip"
    RING = "a ring"
    LINE = "a line"
    PLANE = "a plane"
    CUBOID = "all three axes"
    BLOCK = "a block"
    SPREAD = "chips apart from each other"
    SLICES = "one chip of each slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Digit:
    """A part of one axis of the slice: `size` positions that are `stride` apart.

    Attributes:
        axis: 0, 1, 2 for x, y, z; 3 for the devices of a chip.
        size: how many positions.
        stride: how many positions of the axis lie between one and the next.
    """

    axis: int
    size: int
    stride: int = 1

    def __str__(self) -> str:
        if self.axis == CORE_AXIS:
            return f"{self.size} cores"
        apart = f" every {self.stride}" if self.stride > 1 else ""
        return f"{AXIS_NAMES[self.axis]}[{self.size}]{apart}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices that one mesh axis joins, as the digits of the slice's axes that it spans.

    Attributes:
        slice: the slice they are in.
        digits: at most one per axis of the slice, of a size above 1; in the order x, y, z, core.
    """

    slice: Slice
    digits: tuple[Digit, ...]

    @property
    def num_chips(self) -> int:
        """Chips in the group."""
        return math.prod(digit.size for digit in self._on_chips())

    @property
    def num_cores(self) -> int:
        """Devices that the group has of each of its chips."""
        return math.prod(digit.size for digit in self.digits if digit.axis == CORE_AXIS)

    @property
    def spans_whole_axes(self) -> bool:
        """Whether each axis that the group extends along is in it from end to end."""
        return all(digit.size == self.slice.shape[digit.axis] for digit in self._on_chips())

    @property
    def kind(self) -> GroupKind:
        """How its chips stand."""
        digits = self._on_chips()
        if not digits:
            return GroupKind.CORES if self.num_cores > 1 else GroupKind.SINGLE
        if any(digit.stride > 1 for digit in digits):
            return GroupKind.SPREAD
        if len(digits) == 1:
            is_ring = self.spans_whole_axes and self._closes(digits[0])
            return GroupKind.RING if is_ring else GroupKind.LINE
        if not self.spans_whole_axes:
            return GroupKind.BLOCK
        return GroupKind.PLANE if len(digits) == 2 else GroupKind.CUBOID

    @property
    def num_links(self) -> float:
        """Links that each chip can use at once, one way; less than 1 where links are shared."""
        digits = self._on_chips()
        if not digits:
            return math.inf
        share = self.slice.generation.devices_per_chip // self.num_cores
        return self._links_of_chips(digits) / share

    @property
    def available_links(self) -> float:
        """Links that a chip has towards its group, one way: what no program can exceed.

        More than `num_links` where one ring does not use them all.
        """
        digits = self._on_chips()
        if not digits:
            return math.inf
        share = self.slice.generation.devices_per_chip // self.num_cores
        there = sum(self._links_of_chips((digit,)) for digit in digits)
        return max(self.num_links, there / share)

    @property
    def gather_cost(self) -> float:
        """Time of an all_gather, in units of (bytes gathered) / (bandwidth of one link)."""
        return (1 - 1 / self.num_chips) / self.num_links

    def _on_chips(self) -> tuple[Digit, ...]:
        return tuple(digit for digit in self.digits if digit.axis != CORE_AXIS)

    def _links_of_chips(self, digits: tuple[Digit, ...]) -> float:
        if all(digit.size == self.slice.shape[digit.axis] for digit in digits):
            return sum(self._whole_axis_links(digit.axis) for digit in digits)
        stride = max(digit.stride for digit in digits)
        if len(digits) == 1:
            return (2 if self._closes(digits[0]) else 1) / stride
        is_walkable = math.prod(digit.size for digit in digits) % 2 == 0
        return (2 if is_walkable else 1) / stride

    def _whole_axis_links(self, axis: int) -> int:
        # The wrap-around of a twisted torus does not lead back to the same line.
        return 1 if self.slice.twisted else num_links_along(self.slice, axis)

    def _closes(self, digit: Digit) -> bool:
        """Whether the step after the last position leads to the first again."""
        is_round = digit.size * digit.stride == self.slice.shape[digit.axis]
        wraps = self.slice.wrap[digit.axis] and not self.slice.twisted
        return is_round and wraps and digit.size > 2
