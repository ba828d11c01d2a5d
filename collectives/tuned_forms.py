"""The forms in which collectives use the links of a TPU slice, as JAX functions of one device.

`tuning.py` is the table of which form is for what. The process group's programs (`forms.py`) and
those of `tpu-launch plan` (`ahead_of_time.py`) are made of the same functions.

A payload goes in flat. The members of the group are numbered by their place in the program's mesh:
row-major over (slice, x, y, z, core). Over several slices a collective is done in two: what crosses
DCN is then the least that can be, and runs between devices that stand at the same place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_dist.topology.groups import Digit

Array = Any
Function = Callable[[Array], Array]

LANES = 128  # elements of a row of a tile
TILE_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedForm:
    """How a collective over one group is done.

    Attributes:
        verb: a key of ``FUNCTIONS``.
        digits: the parts of the slice's axes that the group spans, as axes of the program's mesh;
            one of all members where they are no regular part of it.
        num_slices: how many slices the group spans; above 1 they are the mesh's first axis.
        phases: positions in ``digits``; each phase is a collective over those.
        lanes: elements of a row, if the payload goes in as rows: so many, or 128 where the pieces
            of a phase are no whole tiles of them; None if it is flat.
        by_exchange: whether a reduce_scatter is an all_to_all, and a sum of what arrives.
        options: for the compiler.
        root: place of the one that has the payload, in a broadcast or a scatter.
        reducer: name of the jax.lax collective of an all_reduce.
    """

    verb: str
    digits: tuple[Digit, ...]
    num_slices: int = 1
    phases: tuple[tuple[int, ...], ...]
    lanes: int | None = None
    by_exchange: bool = False
    options: Mapping[str, bool] = field(default_factory=dict)
    root: int = 0
    reducer: str = "psum"

    def __str__(self) -> str:
        parts = ["flat" if self.lanes is None else f"rows of {self.lanes}"]
        if self.by_exchange:
            parts.append("exchanged")
        if len(self.phases) > 1:
            parts.append(f"{len(self.phases)} phases")
        if self.num_slices > 1:
            parts.append("slices apart")
        if self.options:
            parts.append(f"{len(self.options)} option{'s' if len(self.options) > 1 else ''}")
        return ", ".join(parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the program's mesh, the slices first if there are several."""
        inner = tuple(digit.size for digit in self.digits)
        return (self.num_slices, *inner) if self.num_slices > 1 else inner

    @property
    def num_members(self) -> int:
        """Devices in the group."""
        return math.prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the program's axes, one for each size."""
        inner = tuple(f"axis{index}" for index in range(len(self.digits)))
        return (_SLICES, *inner) if self.num_slices > 1 else inner

    def function(self) -> Function:
        """Return the JAX function of one device's flat payload; for use inside shard_map.

        It is to run on a mesh that has axes of these names and sizes.
        """
        return FUNCTIONS[self.verb](self)


_SLICES = "slices"


def flat_form(verb: str, size: int, **changes: Any) -> TunedForm:
    """Return the form as it is written without a thought: flat, over one axis, no options."""
    digits = (Digit(axis=0, size=size),)
    return TunedForm(verb=verb, digits=digits, phases=((0,),), **changes)


def _inner(form: TunedForm) -> tuple[str, ...]:
    """The names of the axes within a slice."""
    return form.names[1:] if form.num_slices > 1 else form.names


def _rows(form: TunedForm, payload: Array) -> Array:
    return payload if form.lanes is None else payload.reshape(-1, form.lanes)


def _all_gather(form: TunedForm) -> Function:
    from jax import lax

    def gather(payload: Array) -> Array:
        if form.num_slices > 1:
            payload = lax.all_gather(payload, _SLICES, tiled=True)
        gathered = lax.all_gather(_rows(form, payload), _inner(form), tiled=True)
        if form.num_slices == 1:
            return gathered.reshape(-1)
        members = form.num_members // form.num_slices
        return gathered.reshape(members, form.num_slices, -1).swapaxes(0, 1).reshape(-1)

    return gather


def _all_reduce(form: TunedForm) -> Function:
    from jax import lax

    reduce = getattr(lax, form.reducer)

    def scatter_and_gather(payload: Array) -> Array:
        import jax.numpy as jnp

        lanes = form.lanes or LANES
        grain = lanes * (form.num_members // form.num_slices)
        padding = -payload.size % grain
        rows = jnp.pad(payload, (0, padding)).reshape(-1, lanes)
        piece = lax.psum_scatter(rows, _inner(form), tiled=True)
        if form.num_slices > 1:
            piece = lax.psum(piece, _SLICES)
        whole = lax.all_gather(piece, _inner(form), tiled=True).reshape(-1)
        return whole[: payload.size] if padding else whole

    in_pieces = form.reducer == "psum" and (form.lanes is not None or form.num_slices > 1)
    return scatter_and_gather if in_pieces else lambda payload: reduce(payload, form.names)


def _reduce_scatter(form: TunedForm) -> Function:
    """Scatter phase by phase; pieces are put in the order of phases first, so each gets its own."""
    from jax import lax

    sizes = tuple(digit.size for digit in form.digits)
    names = _inner(form)
    order = tuple(index for phase in form.phases for index in phase)

    def scatter(payload: Array) -> Array:
        if form.num_slices > 1:
            members = math.prod(sizes)
            payload = payload.reshape(form.num_slices, members, -1).swapaxes(0, 1).reshape(-1)
        if order != tuple(range(len(sizes))):
            pieces = payload.reshape(*sizes, -1)
            payload = pieces.transpose(*order, len(sizes)).reshape(-1)
        for phase in form.phases:
            over = tuple(names[index] for index in phase)
            lanes = _lanes_that_fit(form, payload.size // math.prod(sizes[i] for i in phase))
            rows = payload if lanes is None else payload.reshape(-1, lanes)
            payload = lax.psum_scatter(rows, over, tiled=True).reshape(-1)
        if form.num_slices > 1:
            payload = lax.psum_scatter(payload, _SLICES, tiled=True)
        return payload

    def exchange_and_sum(payload: Array) -> Array:
        arrived = _all_to_all(form)(payload)
        return arrived.reshape(form.num_members, -1).sum(0).astype(payload.dtype)

    return exchange_and_sum if form.by_exchange else scatter


def _lanes_that_fit(form: TunedForm, piece: int) -> int | None:
    """Return the length of rows of which a piece of so many elements is whole tiles."""
    if form.lanes is None:
        return None
    return form.lanes if piece % (TILE_ROWS * form.lanes) == 0 else LANES


def _all_to_all(form: TunedForm) -> Function:
    from jax import lax

    def exchange(payload: Array) -> Array:
        pieces = payload.reshape(form.num_members, -1)
        return lax.all_to_all(pieces, form.names, 0, 0).reshape(-1)

    return exchange


def _only_the_root_s(form: TunedForm, payload: Array) -> Array:
    import jax.numpy as jnp
    from jax import lax

    return jnp.where(lax.axis_index(form.names) == form.root, payload, jnp.zeros_like(payload))


def _broadcast(form: TunedForm) -> Function:
    reduce = _all_reduce(form)
    return lambda payload: reduce(_only_the_root_s(form, payload))


def _scatter(form: TunedForm) -> Function:
    scatter = _reduce_scatter(form)
    return lambda payload: scatter(_only_the_root_s(form, payload))


FUNCTIONS: Mapping[str, Callable[[TunedForm], Function]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
}
