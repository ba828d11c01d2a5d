"""Where the members of a group of ranks stand: what its programs are laid out and chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tpu_dist.topology.groups import CORE_AXIS, Digit, Group
from tpu_dist.topology.rank_map import Numbers, RankMap, coordinates
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.system import System


class Extent(Enum):
    """What of a system a group of ranks is, as far as its programs care."""

    SLICE = "a whole slice"
    BLOCK = "a regular part of a slice, as the axes of a mesh are"
    SUBSET = "some devices of a slice"
    SLICES = "the same part of several slices"
    SCATTERED = "some devices of several slices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the members of one group stand.

    Attributes:
        system: what they are in.
        extent: what of it they are.
        num_slices: how many slices they are in.
        group: what they are in each slice; None where they are no regular part of it.
        order: the member at each place of a program's mesh: row-major over (slice, x, y, z, core),
            as the compiler wants it.
    """

    system: System
    extent: Extent
    num_slices: int
    group: Group | None
    order: tuple[int, ...]

    @property
    def num_members(self) -> int:
        """Devices in the group."""
        return len(self.order)

    @property
    def can_run_programs(self) -> bool:
        """Whether the members alone can run a program with collectives."""
        slice_ = self.system.slice
        is_whole = self.num_members == self.num_slices * slice_.num_devices
        largest_host = max(slice_.generation.host_grids)
        is_free = not slice_.generation.limited_routing or slice_.num_chips <= largest_host
        return is_whole or is_free or self.num_members == 1


def place_group(rank_map: RankMap, ranks: Sequence[int]) -> Placement:
    """Return where the ranks of a group stand; a pure function, the same on every rank.

    Args:
        rank_map: of the job.
        ranks: global ranks of the group, in its order.

    Example:
        >>> row_major = RankMap.row_major(System.parse("v6e:4x4"))
        >>> place_group(row_major, [0, 4, 8, 12]).group.digits
        (Digit(axis=0, size=4, stride=1),)
    """
    system = rank_map.system
    devices = rank_map.devices[np.asarray(ranks)]
    order = np.argsort(devices)
    places = coordinates(system)[devices[order]]
    slices = sorted(set(places[:, 0].tolist()))
    parts = [places[places[:, 0] == index] for index in slices]
    alike = all(np.array_equal(part[:, 1:], parts[0][:, 1:]) for part in parts)
    group = group_of(system.slice, parts[0]) if alike else None
    return Placement(
        system=system,
        extent=_extent(system, len(parts), parts[0], group),
        num_slices=len(parts),
        group=group,
        order=tuple(order.tolist()),
    )


def _extent(system: System, num_slices: int, part: Numbers, group: Group | None) -> Extent:
    if num_slices > 1:
        return Extent.SCATTERED if group is None else Extent.SLICES
    if group is None:
        return Extent.SUBSET
    return Extent.SLICE if len(part) == system.slice.num_devices else Extent.BLOCK


def group_of(slice_: Slice, places: Numbers) -> Group | None:
    """Return the group that these devices are, or None if they are no regular block of one slice.

    Args:
        slice_: the slice.
        places: (slice, x, y, z, core) of each device.
    """
    digits = []
    volume = 1
    for axis in range(CORE_AXIS + 1):
        at = sorted(set(places[:, axis + 1].tolist()))
        steps = {b - a for a, b in zip(at, at[1:], strict=False)}
        if len(steps) > 1:
            return None
        volume *= len(at)
        if len(at) > 1:
            digits.append(Digit(axis=axis, size=len(at), stride=steps.pop()))
    if volume != len(places) or len(set(places[:, 0].tolist())) > 1:
        return None
    return Group(slice=slice_, digits=tuple(digits))
