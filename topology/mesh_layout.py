"""The layout of a logical mesh on the devices of a system: which device stands at which place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpu_dist.topology.groups import CORE_AXIS, Digit, Group, GroupKind
from tpu_dist.topology.rank_map import Numbers, RankMap
from tpu_dist.topology.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLayout:
    """One axis of the mesh.

    Attributes:
        name: of the axis.
        num_slices: how many slices the axis joins over DCN; the slower part of its index.
        group: what it joins within a slice.
    """

    name: str
    num_slices: int = 1
    group: Group

    @property
    def size(self) -> int:
        """Devices along the axis."""
        return self.num_slices * math.prod(digit.size for digit in self.group.digits)

    @property
    def kind(self) -> GroupKind:
        """How the devices of one group stand."""
        if self.num_slices > 1 and self.group.kind is GroupKind.SINGLE:
            return GroupKind.SLICES
        return self.group.kind

    def __str__(self) -> str:
        parts = [f"{self.num_slices} slices"] if self.num_slices > 1 else []
        parts += map(str, self.group.digits)
        text = f"{self.name}={self.size}: {self.kind.value}"
        if parts:
            text += f" ({' x '.join(parts)})"
        links = self.group.num_links
        if math.isfinite(links):
            text += f", {links:.3g} link{'' if links == 1 else 's'}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """A logical mesh laid on a system; `mesh_search.lay_out_mesh` finds the best one.

    Attributes:
        system: what it is laid on.
        axes: the mesh's axes, the outermost first.
    """

    system: System
    axes: tuple[AxisLayout, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The mesh's shape."""
        return tuple(axis.size for axis in self.axes)

    @property
    def costs(self) -> tuple[float, ...]:
        """Each axis's `Group.gather_cost`: what the layout is chosen by; DCN is not in it."""
        return tuple(axis.group.gather_cost for axis in self.axes)

    def devices(self) -> Numbers:
        """Return the number of the device at each place of the mesh: an array of its shape.

        Along an axis the devices go row-major over what the axis spans, cores fastest.
        """
        places: list[tuple[int, int]] = []  # (size, stride in device numbers), outermost first
        for axis in self.axes:
            places += self._places(axis)
        numbers = np.zeros((), np.int64)
        for size, stride in places:
            numbers = numbers[..., np.newaxis] + np.arange(size) * stride
        return numbers.reshape(self.shape)

    def ranks(self, rank_map: RankMap) -> Numbers:
        """Return the rank at each place of the mesh, for a job with that rank map."""
        return rank_map.ranks()[self.devices()]

    def rank_map(self) -> RankMap:
        """Return the order of ranks in which the plain mesh, arange(n).reshape(shape), is this."""
        return RankMap(system=self.system, devices=self.devices().reshape(-1))

    def groups(self, axis: int) -> Numbers:
        """Return the device numbers of each group of an axis: shape [groups, members]."""
        return np.moveaxis(self.devices(), axis, -1).reshape(-1, self.shape[axis])

    def distance_from_row_major(self) -> int:
        """Return how many pairs of digits stand in another order than in the compiler's."""
        strides = [s for axis in self.axes for n, s in self._places(axis) if n > 1]
        return sum(a < b for i, a in enumerate(strides) for b in strides[i + 1 :])

    def _places(self, axis: AxisLayout) -> list[tuple[int, int]]:
        slice_ = self.system.slice
        cores = slice_.generation.devices_per_chip
        strides = (
            slice_.shape.y * slice_.shape.z * cores,
            slice_.shape.z * cores,
            cores,
            1,
        )
        places = []
        if axis.num_slices > 1:
            inner = math.prod(other.num_slices for other in self.axes[self.axes.index(axis) + 1 :])
            places.append((axis.num_slices, inner * slice_.num_devices))
        places += [(digit.size, digit.stride * strides[digit.axis]) for digit in axis.group.digits]
        return places


def extents(system: System) -> tuple[int, int, int, int]:
    """Return what can be laid out in one slice: positions along x, y, z and devices of a chip."""
    return (*system.slice.shape, system.slice.generation.devices_per_chip)


def digits_of(sizes: Sequence[int], strides: Sequence[int]) -> tuple[Digit, ...]:
    """Return the digits of one mesh axis, from its size and stride along x, y, z and core."""
    return tuple(
        Digit(axis=axis, size=sizes[axis], stride=strides[axis])
        for axis in range(CORE_AXIS + 1)
        if sizes[axis] > 1
    )
