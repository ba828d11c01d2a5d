"""What the links of a slice carry when every group of a mesh axis gathers, by walking the messages.

An oracle for the model in `tpu_dist.topology.groups`, which has formulas instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tpu_dist.topology.coordinates import Coord
from tpu_dist.topology.slice import Slice

Hop = tuple[Coord, int, int]  # from a chip, along an axis, by a step


def route(slice_: Slice, one: Coord, other: Coord) -> Iterator[Hop]:
    """Yield the hops of one shortest way, axis after axis."""
    at = list(one)
    for axis, extent in enumerate(slice_.shape):
        difference = other[axis] - at[axis]
        if slice_.wrap[axis] and abs(difference) > extent / 2:
            difference -= int(math.copysign(extent, difference))
        step = 1 if difference > 0 else -1
        for _ in range(abs(difference)):
            yield Coord(*at), axis, step
            at[axis] = (at[axis] + step) % extent


def ring_links(slice_: Slice, rings: Iterable[Sequence[Coord]]) -> float:
    """Return the links that each ring can use when all of them run, both ways around at once.

    Each ring sends half of its bytes either way; the busiest link decides.
    """
    load: Counter[Hop] = Counter()
    for ring in rings:
        for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
            load.update(route(slice_, here, there))
            load.update(route(slice_, there, here))
    return 2 / max(load.values())


def grid_links(slice_: Slice, groups: Sequence[Sequence[Coord]]) -> float:
    """Return the same for groups that are whole lines, planes or more: rings along each axis.

    The bytes are split among the axes, and the messages along one axis use its links alone.
    """
    total = 0.0
    for axis in range(3):
        lines: dict[tuple[int, ...], list[Coord]] = {}
        for number, group in enumerate(groups):
            for coord in sorted(group):
                rest = tuple(at for other, at in enumerate(coord) if other != axis)
                lines.setdefault((number, *rest), []).append(coord)
        rings = [line for line in lines.values() if len(line) > 1]
        if rings:
            total += ring_links(slice_, rings)
    return total


def walk_round(coords: Sequence[Coord]) -> list[Coord]:
    """Return a closed walk over a block, in steps to the next member where one exists.

    Of an even number of chips of a block in two or three axes; others come back the long way.
    """
    axes = [sorted({coord[axis] for coord in coords}) for axis in range(3)]
    wide = sorted(
        (axis for axis in range(3) if len(axes[axis]) > 1), key=lambda axis: len(axes[axis]) % 2
    )
    if len(wide) < 2:
        return sorted(coords)
    even, *rest = wide  # the axis of even length closes the walk
    columns = _snake([axes[axis] for axis in rest])
    out, back = columns[0], columns[1:]
    walk = [(at, out) for at in axes[even]]
    for index, at in enumerate(reversed(axes[even])):
        walk += [(at, column) for column in (back if index % 2 == 0 else back[::-1])]
    placed = []
    for at, column in walk:
        coord = [axes[axis][0] for axis in range(3)]
        coord[even] = at
        for axis, value in zip(rest, column, strict=True):
            coord[axis] = value
        placed.append(Coord(*coord))
    return placed


def _snake(axes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    if len(axes) == 1:
        return [(at,) for at in axes[0]]
    inner = _snake(axes[1:])
    walk = []
    for index, at in enumerate(axes[0]):
        walk += [(at, *column) for column in (inner if index % 2 == 0 else inner[::-1])]
    return walk
