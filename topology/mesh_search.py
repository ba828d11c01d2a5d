"""Finds the layout of a logical mesh whose axes have the most links.

Each axis of the slice (x, y, z, and the devices of a chip) is cut into one factor per mesh axis;
who gets the near positions and who the far ones is tried in every order. Of all such layouts the
one is taken whose axes together need the least time, where each axis gathers four times the bytes
of the axis outside of it, unless the caller knows better: the inner axes come first, but not at any
price. Of equals, the one with more groups that span
whole axes of the slice, then the one that is faster on the inner axes, and then the one nearest to
row-major order. Slices are laid on the outermost axes, as DCN is the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations

from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.groups import Group
from tpu_dist.topology.mesh_layout import AxisLayout, MeshLayout, digits_of, extents
from tpu_dist.topology.system import System

# For each axis of the slice, how many of its positions each mesh axis gets.
_Factors = tuple[tuple[int, ...], ...]
# For each axis of the slice, how far apart these are.
_Strides = tuple[tuple[int, ...], ...]

_Cost = tuple[float, int, tuple[float, ...]]

_INNER_WEIGHT = 4.0  # of an axis, against the one outside of it

_EQUAL = 1e-9
_DIGITS = 9  # costs that differ later are equal: sums of fractions


def lay_out_mesh(
    system: System,
    mesh_shape: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    traffic: Sequence[float] | None = None,
) -> MeshLayout:
    r"""Lay a mesh on a system so that its axes have the most links; a pure function.

    Args:
        system: what the job runs on.
        mesh_shape: the mesh's sizes, the outermost axis first; their product is the device count.
        names: of the axes; default ``axis0``, ``axis1`` ...
        traffic: how many bytes each axis gathers, relative to the others; default: four times
            those of the axis outside of it.

    Raises:
        TopologyError: the mesh has another number of devices, or the slices fit on no outer axes.

    Example:
        >>> layout = lay_out_mesh(System.parse("tpu7x:4x4x4"), (16, 8), names=("dp", "tp"))
        >>> print(*layout.axes, sep="\n")
        dp=16: a plane (x[4] x y[4]), 2 links
        tp=8: a ring (z[4] x 2 cores), 2 links
    """
    shape = tuple(mesh_shape)
    names = _checked_names(shape, names)
    weights = _checked_traffic(shape, traffic)
    if not shape or min(shape) < 1 or math.prod(shape) != system.num_devices:
        raise TopologyError(
            f"a mesh of {shape} has {math.prod(shape)} places, and {system} has "
            f"{system.num_devices} devices. Give sizes whose product is {system.num_devices}."
        )
    num_slices = _lay_out_slices(system, shape)
    sizes = tuple(size // n for size, n in zip(shape, num_slices, strict=True))

    def layout(factors: _Factors, strides: _Strides) -> MeshLayout:
        return MeshLayout(
            system=system,
            axes=tuple(
                AxisLayout(
                    name=names[mesh_axis],
                    num_slices=num_slices[mesh_axis],
                    group=_group(system, mesh_axis, factors, strides),
                )
                for mesh_axis in range(len(shape))
            ),
        )

    candidates = _best(system, sizes, weights)
    return min((layout(*each) for each in candidates), key=MeshLayout.distance_from_row_major)


def _best(
    system: System, sizes: tuple[int, ...], weights: tuple[float, ...]
) -> list[tuple[_Factors, _Strides]]:
    """Return the cuts that no other is better than.

    Mesh axes are given their factors one by one, the innermost first. A layout costs no less than
    it would if each axis's positions were next to each other, and what remains no less than if it
    had the whole slice to choose from: what cannot be best is left as soon as that shows.
    """
    cost = _CostTable(system, weights)
    whole = extents(system)
    cheapest = [cost.columns(axis, size, whole)[0][0] for axis, size in enumerate(sizes)]
    best: _Cost = (math.inf, 0, ())
    found: list[tuple[_Factors, _Strides]] = []

    def choose(axis: int, left: tuple[int, ...], spent: float, inner: _Factors) -> None:
        if axis < 0:
            arrange(tuple(zip(*inner, strict=True)), ())
            return
        outer = sum(cheapest[:axis])
        for least, column in cost.columns(axis, sizes[axis], left):
            if spent + least + outer > best[0] + _EQUAL:
                return
            rest = tuple(extent // factor for extent, factor in zip(left, column, strict=True))
            choose(axis - 1, rest, spent + least, (column, *inner))

    def arrange(factors: _Factors, chosen: _Strides) -> None:
        nonlocal best, found
        near = ((1,) * len(sizes),) * (len(whole) - len(chosen))
        candidate = cost(factors, chosen + near)
        if candidate[0] > best[0]:
            return
        if near:
            for strides in _orders(factors[len(chosen)]):
                arrange(factors, (*chosen, strides))
            return
        if candidate < best:
            best, found = candidate, []
        if candidate == best:
            found.append((factors, chosen))

    choose(len(sizes) - 1, whole, 0.0, ())
    return found


class _CostTable:
    """What layouts are compared by: the total, groups that span no whole axes, each axis's cost."""

    def __init__(self, system: System, weights: tuple[float, ...]) -> None:
        self._slice = system.slice
        self._weights = weights
        self._of_group: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]] = {}

    def __call__(self, factors: _Factors, strides: _Strides) -> _Cost:
        columns = zip(zip(*factors, strict=True), zip(*strides, strict=True), strict=True)
        groups = [self._look_up(sizes, apart) for sizes, apart in columns]
        total = sum(w * cost for w, (cost, _) in zip(self._weights, groups, strict=True))
        return (
            round(total, _DIGITS),
            sum(not whole for _, whole in groups),
            tuple(round(cost, _DIGITS) for cost, _ in reversed(groups)),
        )

    def columns(
        self, mesh_axis: int, size: int, left: tuple[int, ...]
    ) -> list[tuple[float, tuple[int, ...]]]:
        """Return what a mesh axis may take of what is left, with the least cost of it; by cost."""
        weight = self._weights[mesh_axis]
        near = (1,) * len(left)
        return sorted(
            (weight * self._look_up(column, near)[0], column) for column in _factorings(size, left)
        )

    def _look_up(self, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[float, bool]:
        key = (sizes, strides)
        if key not in self._of_group:
            group = Group(slice=self._slice, digits=digits_of(sizes, strides))
            self._of_group[key] = (group.gather_cost, group.spans_whole_axes)
        return self._of_group[key]


def _group(system: System, mesh_axis: int, factors: _Factors, strides: _Strides) -> Group:
    return Group(
        slice=system.slice,
        digits=digits_of([row[mesh_axis] for row in factors], [row[mesh_axis] for row in strides]),
    )


def _factorings(size: int, limits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `size` as a product of one divisor of each limit."""
    if not limits:
        if size == 1:
            yield ()
        return
    for factor in range(1, math.gcd(size, limits[0]) + 1):
        if size % factor == 0 and limits[0] % factor == 0:
            for rest in _factorings(size // factor, limits[1:]):
                yield (factor, *rest)


@lru_cache(maxsize=4096)
def _orders(row: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    cut = [mesh_axis for mesh_axis, factor in enumerate(row) if factor > 1]
    orders = []
    for order in permutations(cut):
        strides, stride = [1] * len(row), 1
        for mesh_axis in order:
            strides[mesh_axis] = stride
            stride *= row[mesh_axis]
        orders.append(tuple(strides))
    return tuple(orders)


def _lay_out_slices(system: System, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many slices each axis joins: whole outermost axes, then a part of the next."""
    left = system.num_slices
    taken = []
    for size in shape:
        part = min(size, left)
        if left % part or size % part:
            raise TopologyError(
                f"the {system.num_slices} slices of {system} cannot be laid on the outermost axes "
                f"of a mesh of {shape}: the inner ones would cross DCN. Let the outermost axis be "
                f"a multiple or a divisor of {system.num_slices}."
            )
        taken.append(part)
        left //= part
    return tuple(taken)


def _checked_names(shape: tuple[int, ...], names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return tuple(f"axis{index}" for index in range(len(shape)))
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ValueError(f"a mesh of {shape} needs {len(shape)} different names, got {names}")
    return tuple(names)


def _checked_traffic(shape: tuple[int, ...], traffic: Sequence[float] | None) -> tuple[float, ...]:
    if traffic is None:
        return tuple(_INNER_WEIGHT**index for index in range(len(shape)))
    if len(traffic) != len(shape) or min(traffic, default=0) < 0:
        raise ValueError(f"a mesh of {shape} needs {len(shape)} weights >= 0, got {traffic}")
    return tuple(traffic)
