"""Google Cloud's names for slices by size: v5litepod-16, v5p-128, tpu7x-128.

They count chips for v5e and v6e, and TensorCores, two a chip, for the others; and they do not say
the shape. Where one size comes in several shapes the name is refused, with the shapes.
Source: cloud.google.com/tpu/docs, the page of each generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import Generation, find_generation
from tpu_dist.topology.shapes import format_for, possible_shapes, shapes_of_size
from tpu_dist.topology.slice import Slice

_NAME = re.compile(r"\s*([a-z0-9]+)-(\d{1,9})\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorType:
    """What an accelerator type says: a generation and a number of chips, and no shape."""

    generation: Generation
    num_chips: int


def is_accelerator_type(text: str) -> bool:
    """Whether the text is written as one, be there one of that name or not."""
    return _NAME.fullmatch(text.lower()) is not None


def read_accelerator_type(text: str) -> AcceleratorType:
    """Read generation and number of chips.

    Raises:
        TopologyError: it is not written as one, or counts what no number of chips has.
    """
    match = _NAME.fullmatch(text.lower())
    if match is None:
        raise TopologyError(
            f"{text!r} is no accelerator type: those are written as v5litepod-16 or v5p-128."
        )
    generation = find_generation(match[1])
    num_chips, rest = divmod(int(match[2]), generation.cores_per_chip_in_names)
    if rest or not num_chips:
        raise TopologyError(
            f"{text!r} is no accelerator type: the number of a {generation} counts cores, "
            f"{generation.cores_per_chip_in_names} a chip. "
            f"Did you mean {_nearest(generation, num_chips)}?"
        )
    return AcceleratorType(generation=generation, num_chips=num_chips)


def parse_accelerator_type(text: str, *, chips_per_host: int | None = None) -> Slice:
    """Return the one slice that an accelerator type means.

    Raises:
        TopologyError: none, or several: lists the candidates.

    Example:
        >>> str(parse_accelerator_type("v5litepod-16"))
        'v5e:4x4'
    """
    named = read_accelerator_type(text)
    generation = named.generation
    shapes = shapes_of_size(generation, named.num_chips)
    if not shapes:
        raise TopologyError(
            f"no {generation} slice has {named.num_chips} chips, which {text!r} says. "
            f"Did you mean {_nearest(generation, named.num_chips)}?"
        )
    if len(shapes) > 1:
        candidates = ", ".join(f"{generation}:{format_for(generation, shape)}" for shape in shapes)
        raise TopologyError(
            f"{text!r} may be any slice of {named.num_chips} chips: {candidates}. Name one of them."
        )
    return Slice.of(generation, shapes[0], chips_per_host=chips_per_host)


def accelerator_type(slice_: Slice) -> str:
    """Return the accelerator type of a slice; the inverse, where the shape is the only one."""
    generation = slice_.generation
    prefix = _PREFIX.get(generation.name, generation.name)
    return f"{prefix}-{slice_.num_chips * generation.cores_per_chip_in_names}"


_PREFIX: Mapping[str, str] = {"v5e": "v5litepod"}


def _nearest(generation: Generation, num_chips: int) -> str:
    sizes = {shape.volume for shape in possible_shapes(generation)}
    below = max((size for size in sizes if size <= num_chips), default=None)
    above = min((size for size in sizes if size > num_chips), default=None)
    prefix = _PREFIX.get(generation.name, generation.name)
    near = [size * generation.cores_per_chip_in_names for size in (below, above) if size]
    return " or ".join(f"{prefix}-{number}" for number in near)
