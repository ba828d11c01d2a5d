"""The forms in which collectives use the links of a TPU slice: data, and the JAX functions of them.

What the rules rest on: programs that libtpu 0.0.42 compiled, `tpu-launch plan` shows them.

- all_gather and all_reduce stay whole; with the SparseCore they use all links of whole axes. On
  v5e, which has none, a flat all_gather of 64 chips and more is no ring; as rows of 128 it is one.
- reduce_scatter of a flat payload becomes an all-reduce and a slice; as rows it does not, if shards
  that are no multiple of three tiles are padded. Small shards of tpu7x, and v5e where it wraps,
  want rows of 1024.
- An all_reduce over members that are spread over their axes is one ring; as a scatter and a gather
  it goes along all of the axes.
- Above 2,048 devices a whole reduce_scatter becomes an all-reduce: it is done over all axes but
  one of the slice, then over that.

Which of a verb's few candidates a slice wants is told by compiling them (`planner.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_dist.topology.errors import UnsupportedError
from tpu_dist.topology.groups import CORE_AXIS, Digit, Group

VERBS = ("all_reduce", "all_gather", "reduce_scatter")
NAIVE = "naive"
TUNED = "tuned"

LANES = 128  # elements of a row of a tile
TILE_ROWS = 8

_MOST_DEVICES_OF_ONE_SCATTER = 2048

_SPARSE_CORE = "xla_tpu_enable_sparse_core_"
_OFFLOAD: Mapping[str, bool] = {
    f"{_SPARSE_CORE}collective_offload_{kind}": True
    for kind in (
        "all_gather",
        "2d_all_gather",
        "3d_all_gather",
        "all_reduce",
        "reduce_scatter",
        "nd_reduce_scatter",
    )
}
_ND_SCATTER: Mapping[str, bool] = {f"{_SPARSE_CORE}collective_offload_nd_reduce_scatter": True}
_PADDING: Mapping[str, bool] = {f"{_SPARSE_CORE}reduce_scatter_padding": True}

# By generation and verb. All of them are booleans that libtpu 0.0.42 knows: another type, or a flag
# that it does not know, ends or fails the compile.
_OPTIONS: Mapping[str, Mapping[str, Mapping[str, bool]]] = {
    "v5e": {"all_reduce": {}, "all_gather": {}, "reduce_scatter": _ND_SCATTER},
    "v5p": {
        "all_reduce": _OFFLOAD,
        "all_gather": _OFFLOAD,
        "reduce_scatter": {**_OFFLOAD, **_PADDING},
    },
    "v6e": {
        "all_reduce": _OFFLOAD,
        "all_gather": _OFFLOAD,
        "reduce_scatter": {**_OFFLOAD, **_PADDING},
    },
    "tpu7x": {"all_reduce": _PADDING, "all_gather": {}, "reduce_scatter": _PADDING},
}


# By verb: what the payload may be laid out as, in the order of preference; None is flat. An
# all_reduce in rows is a scatter and a gather.
_LANES: Mapping[str, tuple[int | None, ...]] = {
    "all_reduce": (None, LANES),
    "all_gather": (None, LANES),
    "reduce_scatter": (LANES, 8 * LANES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedForm:
    """How a collective over one group is done.

    Attributes:
        verb: one of ``VERBS``.
        digits: the parts of the slice's axes that the group spans, as axes of the program's mesh.
        phases: positions in ``digits``; each phase is a collective over those.
        lanes: elements of a row, if the payload goes in as rows: so many, or 128 where the pieces
            of a phase are no whole tiles of them; None if it is flat.
        options: for the compiler.
    """

    verb: str
    digits: tuple[Digit, ...]
    phases: tuple[tuple[int, ...], ...]
    lanes: int | None = None
    options: Mapping[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = ["flat" if self.lanes is None else f"rows of {self.lanes}"]
        if len(self.phases) > 1:
            parts.append(f"{len(self.phases)} phases")
        if self.options:
            parts.append(f"{len(self.options)} option{'s' if len(self.options) > 1 else ''}")
        return ", ".join(parts)

    def function(self, names: tuple[str, ...]) -> Callable[[Any], Any]:
        """Return the JAX function of one device's flat payload; for use inside shard_map.

        Args:
            names: the program's name of each digit's axis.
        """
        return _FUNCTIONS[self.verb](self, names)


def tuned_forms(verb: str, group: Group) -> tuple[TunedForm, ...]:
    """Return the forms worth a compile for a verb over a group of a slice, the likeliest first.

    Raises:
        UnsupportedError: the verb has no form, or nothing is known of the generation.
    """
    generation = group.slice.generation.name
    if generation not in _OPTIONS:
        raise UnsupportedError(
            f"no compiled programs of {generation} were read; forms are known for "
            f"{', '.join(_OPTIONS)}."
        )
    if verb not in VERBS:
        raise UnsupportedError(f"{verb!r} has no tuned form; {', '.join(VERBS)} have.")
    every = tuple(range(len(group.digits)))
    size = group.num_chips * group.num_cores
    phases: tuple[tuple[int, ...], ...] = (every,)
    if verb == "reduce_scatter" and size > _MOST_DEVICES_OF_ONE_SCATTER:
        phases = _scatter_phases(group)
    return tuple(
        TunedForm(
            verb=verb,
            digits=group.digits,
            phases=phases,
            lanes=lanes,
            options=_OPTIONS[generation][verb],
        )
        for lanes in _LANES[verb]
    )


def _scatter_phases(group: Group) -> tuple[tuple[int, ...], ...]:
    """Leave the shortest axis for last that makes the rest small enough, else the longest."""
    size = group.num_chips * group.num_cores
    axes = sorted(
        (digit.size, index) for index, digit in enumerate(group.digits) if digit.axis < CORE_AXIS
    )
    enough = [axis for axis in axes if size // axis[0] <= _MOST_DEVICES_OF_ONE_SCATTER]
    _, last = (enough or axes[-1:])[0]
    return tuple(index for index in range(len(group.digits)) if index != last), (last,)


def naive_form(verb: str, size: int) -> TunedForm:
    """Return the form as it is written without a thought: flat, over one axis, no options."""
    return TunedForm(verb=verb, digits=(Digit(axis=0, size=size),), phases=((0,),))


def _all_gather(form: TunedForm, names: tuple[str, ...]) -> Callable[[Any], Any]:
    from jax import lax

    def gather(payload: Any) -> Any:
        rows = payload if form.lanes is None else payload.reshape(-1, form.lanes)
        return lax.all_gather(rows, names, tiled=True).reshape(-1)

    return gather


def _all_reduce(form: TunedForm, names: tuple[str, ...]) -> Callable[[Any], Any]:
    from jax import lax

    def scatter_and_gather(payload: Any) -> Any:
        rows = lax.psum_scatter(payload.reshape(-1, form.lanes), names, tiled=True)
        return lax.all_gather(rows, names, tiled=True).reshape(-1)

    return scatter_and_gather if form.lanes else lambda payload: lax.psum(payload, names)


def _reduce_scatter(form: TunedForm, names: tuple[str, ...]) -> Callable[[Any], Any]:
    """Scatter phase by phase; pieces are put in the order of phases first, so each gets its own."""
    from jax import lax

    sizes = tuple(digit.size for digit in form.digits)
    order = tuple(index for phase in form.phases for index in phase)

    def scatter(payload: Any) -> Any:
        if order != tuple(range(len(sizes))):
            pieces = payload.reshape(*sizes, -1)
            payload = pieces.transpose(*order, len(sizes)).reshape(-1)
        for phase in form.phases:
            over = tuple(names[index] for index in phase)
            members = math.prod(sizes[index] for index in phase)
            lanes = _lanes_that_fit(form, payload.size // members)
            rows = payload if lanes is None else payload.reshape(-1, lanes)
            payload = lax.psum_scatter(rows, over, tiled=True).reshape(-1)
        return payload

    return scatter


def _lanes_that_fit(form: TunedForm, piece: int) -> int | None:
    """Return the length of rows of which a piece of so many elements is whole tiles."""
    if form.lanes is None:
        return None
    return form.lanes if piece % (TILE_ROWS * form.lanes) == 0 else LANES


_FUNCTIONS: Mapping[str, Callable[[TunedForm, tuple[str, ...]], Callable[[Any], Any]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
