"""Who is next to whom in a slice, how far two chips are apart, and how much a cut carries.

In a twisted torus the wrap-around of a short axis arrives half-way along each long one: k x k x 2k
and k x 2k x 2k. Source: Camarero, Martinez, Beivide, "Lattice Graphs for High-Scale Interconnection
Topologies" (2015), which "TPU v4" (Jouppi et al., ISCA 2023) cites for its twisted tori.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tpu_dist.topology.coordinates import Coord
from tpu_dist.topology.slice import Slice

AXES = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link from one chip to a neighbour.

    Attributes:
        axis: 0, 1 or 2 for x, y or z.
        step: +1 or -1, the way along the axis.
        to: the neighbour.
        is_wrap: whether the link closes the axis to a ring.
    """

    axis: int
    step: int
    to: Coord
    is_wrap: bool


def num_links_along(slice_: Slice, axis: int) -> int:
    """Return how many links along an axis each chip can use at once, one way: 0, 1 or 2.

    Two where the axis is a ring. One on a line, whose ends have no more, and on an axis of two
    chips; none where there is one chip.
    """
    extent = slice_.shape[axis]
    if extent == 1:
        return 0
    return 2 if slice_.wrap[axis] and extent > 2 else 1


def links_of(slice_: Slice, coord: Coord) -> tuple[Link, ...]:
    """Return the links of one chip."""
    return tuple(_links(slice_, coord))


def neighbours(slice_: Slice, coord: Coord) -> tuple[Coord, ...]:
    """Return the chips one link away, each once."""
    return tuple(dict.fromkeys(link.to for link in _links(slice_, coord)))


def hop_distance(slice_: Slice, one: Coord, other: Coord) -> int:
    """Return how many links the shortest way between two chips has."""
    if not slice_.twisted:
        return sum(_along(slice_, axis, other[axis] - one[axis]) for axis in AXES)
    short, long = _short_axes(slice_), _long_axes(slice_)
    shift = slice_.shape[short[0]]
    best = None
    for turns in product((-1, 0, 1), repeat=len(short)):
        hops = sum(
            abs(other[axis] - one[axis] + turn * shift)
            for axis, turn in zip(short, turns, strict=True)
        )
        moved = sum(turns) * shift
        hops += sum(_along(slice_, axis, other[axis] - one[axis] + moved) for axis in long)
        best = hops if best is None else min(best, hops)
    assert best is not None
    return best


def diameter(slice_: Slice) -> int:
    """Return the distance of the two chips farthest apart."""
    origin = Coord(0, 0, 0)
    if not slice_.twisted:
        halves = zip(slice_.shape, slice_.wrap, strict=True)
        return sum(extent // 2 if wrap else extent - 1 for extent, wrap in halves)
    return max(hop_distance(slice_, origin, coord) for coord in slice_.coords())


def bisection_links(slice_: Slice) -> int:
    """Return the fewest links that a cut across an axis into two halves goes through.

    Axes of odd length are cut as near to the middle as can be. 0 for one chip.
    """
    cuts = [_cut(slice_, axis) for axis in AXES if slice_.shape[axis] > 1]
    return min(cuts, default=0)


def bisection_bandwidth(slice_: Slice) -> float:
    """Return what crosses that cut in a second, both ways together, in bytes."""
    return 2 * bisection_links(slice_) * slice_.generation.link_bandwidth


def _links(slice_: Slice, coord: Coord) -> Iterator[Link]:
    for axis in AXES:
        extent = slice_.shape[axis]
        steps = (1, -1) if extent > 2 else (1,) if coord[axis] == 0 else (-1,)
        for step in steps if extent > 1 else ():
            at = coord[axis] + step
            is_wrap = not 0 <= at < extent
            if is_wrap and not slice_.wrap[axis]:
                continue
            to = list(coord)
            to[axis] = at % extent
            if is_wrap and slice_.twisted and axis in _short_axes(slice_):
                for long in _long_axes(slice_):
                    to[long] = (to[long] + extent) % slice_.shape[long]
            yield Link(axis=axis, step=step, to=Coord(*to), is_wrap=is_wrap)


def _along(slice_: Slice, axis: int, difference: int) -> int:
    if not slice_.wrap[axis]:
        return abs(difference)
    extent = slice_.shape[axis]
    return min(difference % extent, -difference % extent)


def _cut(slice_: Slice, axis: int) -> int:
    area = slice_.num_chips // slice_.shape[axis]
    crossed = area * num_links_along(slice_, axis)
    if slice_.twisted and axis in _long_axes(slice_):
        # Every wrapped link of a short axis jumps from one half of the long one into the other.
        shorts = _short_axes(slice_)
        crossed += sum(slice_.num_chips // slice_.shape[short] for short in shorts)
    return crossed


def _short_axes(slice_: Slice) -> list[int]:
    return [axis for axis in AXES if slice_.shape[axis] == min(slice_.shape)]


def _long_axes(slice_: Slice) -> list[int]:
    return [axis for axis in AXES if slice_.shape[axis] == max(slice_.shape)]
