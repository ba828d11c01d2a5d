"""Which shapes a slice of each generation may have, and what is near to one that it may not.

Sources: cloud.google.com/tpu/docs (the page of each generation), xpk's system_characteristics.py;
v2 and v3: the host bounds of torch_xla's table, times the 2x2 chips of a host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import permutations

from tpu_dist.topology.coordinates import Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import GENERATIONS, Generation

CUBE = 4  # an optical switch joins whole 4x4x4 cubes

_PODS: Mapping[str, tuple[Shape, ...]] = {
    "v2": tuple(Shape(*s) for s in ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))),
    "v3": tuple(
        Shape(*s) for s in ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
    ),
    "v5e": tuple(
        Shape(*s) for s in ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    ),
    "v6e": tuple(
        Shape(*s) for s in ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    ),
}

# Below a whole cube; then multiples of 4, up to so many cubes.
_SMALL = tuple(Shape(*s) for s in ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)))
_MOST_CUBES: Mapping[str, int] = {"v4": 64, "v5p": 140, "tpu7x": 144}
_ANY_ORDER = frozenset({"v4"})  # the others want x <= y <= z


@lru_cache(maxsize=len(GENERATIONS))
def possible_shapes(generation: Generation) -> tuple[Shape, ...]:
    """Return every shape, the small ones first; of those that differ in their order, the sorted."""
    if generation.name in _PODS:
        return _PODS[generation.name]
    most = _MOST_CUBES[generation.name]
    cubes = [
        Shape(CUBE * a, CUBE * b, CUBE * c)
        for a in range(1, most + 1)
        for b in range(a, most // a + 1)
        for c in range(b, most // (a * b) + 1)
    ]
    return (*_SMALL, *sorted(cubes, key=lambda shape: (shape.volume, shape.z)))


def is_possible(generation: Generation, shape: Shape) -> bool:
    """Whether a slice of `generation` may have this shape."""
    if shape in possible_shapes(generation):
        return True
    is_cubes = all(extent % CUBE == 0 for extent in shape)
    if is_cubes and generation.name in _ANY_ORDER:
        return Shape(*sorted(shape)) in possible_shapes(generation)
    return False


def check_shape(generation: Generation, shape: Shape) -> None:
    """Refuse a shape that no slice of `generation` has.

    Raises:
        TopologyError: names the nearest ones that there are.
    """
    if is_possible(generation, shape):
        return
    near = ", ".join(
        f"{generation}:{format_for(generation, s)}" for s in nearest(generation, shape)
    )
    raise TopologyError(
        f"there is no {generation}:{format_for(generation, shape)}: {_rule(generation)}. "
        f"The nearest are {near}."
    )


def nearest(generation: Generation, shape: Shape, count: int = 3) -> tuple[Shape, ...]:
    """Return the possible shapes most like `shape`: in the number of chips, then axis by axis."""
    wanted = sorted(max(1, extent) for extent in shape)

    def unlikeness(other: Shape) -> tuple[float, float]:
        axes = zip(wanted, sorted(other), strict=True)
        return (
            abs(math.log2(other.volume / math.prod(wanted))),
            sum(abs(math.log2(a / b)) for a, b in axes),
        )

    return tuple(sorted(possible_shapes(generation), key=unlikeness)[:count])


def shapes_of_size(generation: Generation, num_chips: int) -> tuple[Shape, ...]:
    """Return the shapes with that many chips, the most cubic first."""
    found = [shape for shape in possible_shapes(generation) if shape.volume == num_chips]
    return tuple(sorted(found, key=lambda shape: shape.z if generation.num_axes == 3 else shape.y))


def orders_of(generation: Generation, shape: Shape) -> tuple[Shape, ...]:
    """Return the possible shapes that have these axes, in whichever order."""
    orders = sorted({Shape(*axes) for axes in permutations(shape)})
    return tuple(order for order in orders if is_possible(generation, order))


def format_for(generation: Generation, shape: Shape) -> str:
    """Return the shape with as many axes as the generation has, as in its documentation."""
    axes = shape if shape.z != 1 else shape[: generation.num_axes]
    return "x".join(map(str, axes))


def _rule(generation: Generation) -> str:
    if generation.name in _PODS:
        shapes = ", ".join(format_for(generation, shape) for shape in possible_shapes(generation))
        return f"its slices are {shapes}"
    small = ", ".join(format_for(generation, shape) for shape in _SMALL)
    order = "in any order" if generation.name in _ANY_ORDER else "no axis longer than the next"
    return (
        f"its slices are {small}, or AxBxC in multiples of {CUBE}, {order}, of at most "
        f"{_MOST_CUBES[generation.name]} cubes ({_MOST_CUBES[generation.name] * CUBE**3} chips)"
    )
