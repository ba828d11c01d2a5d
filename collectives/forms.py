"""The forms: how one chunk of each verb is written in JAX.

A form runs on every member of a group at once (inside shard_map, over the axis ``ranks``), on flat
arrays of one size. Two families:

* relative: built from collective-permutes between ranks that are k apart. Operand and output k
  belong to the rank k places further on and k places back. Nothing is sliced or concatenated
  inside the program, so pieces enter as views of the caller's tensors; fastest where the links
  are TCP connections.
* absolute: XLA's own collective for the verb, in the form of `tuned_forms.py` that the group's
  place in the slice asks for; operand and output k belong to rank k. What TPUs have hardware for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_dist.collectives.dtypes import WireType
from tpu_dist.collectives.reducers import Reducer, combine, finish
from tpu_dist.collectives.tuned_forms import TunedForm

Array = Any
AXIS = "ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormContext:
    """What a form is written for.

    Attributes:
        root: place of the root, for forms that have one.
        step: for forms that are one step of several.
        tuned: for absolute forms: how XLA's collective is done.
        order: for absolute forms: the rank at each place of the program's mesh.
    """

    num_ranks: int
    wire: WireType
    reducer: Reducer | None = None
    root: int | None = None
    step: int = 0
    tuned: TunedForm | None = None
    order: tuple[int, ...] = ()


Builder = Callable[[FormContext, Sequence[Array]], Sequence[Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to do a verb.

    Attributes:
        build: traces it: operands to outputs.
        pieces: whether there is one operand for each rank concerned, or a single one for all.
        relative: how operands and outputs are numbered: see the top of this file. A relative form
            leaves out what a rank would send to itself, unless `own` is set.
        own: a relative form's operand 0 is what the rank keeps.
        verb: of an absolute form: what it asks `tuning.py` for.
        from_root: the one output is what the root has for this rank.
    """

    name: str
    build: Builder
    pieces: bool = False
    relative: bool = True
    own: bool = False
    verb: str | None = None
    from_root: bool = False

    def num_operands(self, num_ranks: int) -> int:
        """How many arrays the program takes."""
        if not self.pieces:
            return 1
        return num_ranks if self.own or not self.relative else num_ranks - 1


def _permute(array: Array, pairs: Sequence[tuple[int, int]]) -> Array:
    from jax import lax

    return lax.ppermute(array, AXIS, pairs)


def _shift(array: Array, distance: int, num_ranks: int) -> Array:
    return _permute(array, [(rank, (rank + distance) % num_ranks) for rank in range(num_ranks)])


# --- relative forms


def _spread(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """all_gather: the same array to everybody."""
    size = context.num_ranks
    return [_shift(operands[0], distance, size) for distance in range(1, size)]


def _swap(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """all_to_all: another array to each."""
    size = context.num_ranks
    return [_shift(operands[distance - 1], distance, size) for distance in range(1, size)]


def _collect(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """gather: everybody's array to the root."""
    size, root = context.num_ranks, context.root
    assert root is not None
    return [_permute(operands[0], [((root - k) % size, root)]) for k in range(1, size)]


def _deal(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """scatter: another array of the root's to each."""
    size, root = context.num_ranks, context.root
    assert root is not None
    return [_permute(operands[k - 1], [(root, (root + k) % size)]) for k in range(1, size)]


def _hop(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """One step of a broadcast, a binomial tree: who has been reached passes what it has on.

    A rank puts in what it holds, and holds what comes out of the step that arrival_step() names.
    Steps are programs of their own, since one program would have to choose between the two inside,
    which reads and writes the payload once more on every rank.
    """
    size, root, reached = context.num_ranks, context.root, 1 << context.step
    assert root is not None
    pairs = [
        ((root + k) % size, (root + k + reached) % size)
        for k in range(min(reached, size - reached))
    ]
    return [_permute(operands[0], pairs)]


def num_steps(num_ranks: int) -> int:
    """Steps of a broadcast."""
    return (num_ranks - 1).bit_length()


def arrival_step(place: int) -> int:
    """Step of a broadcast that reaches the rank `place` places after the root; -1 for the root."""
    return place.bit_length() - 1


def _swap_and_reduce(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """reduce_scatter: an all_to_all whose arrivals are combined."""
    import jax.numpy as jnp

    size, reducer = context.num_ranks, context.reducer
    assert reducer is not None
    arrived = [_shift(operands[distance], distance, size) for distance in range(1, size)]
    total = combine(reducer, context.wire, [operands[0], *arrived], jnp)
    return [finish(reducer, context.wire, total, size, jnp)]


def _scatter_and_gather(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """all_reduce of n pieces: each rank reduces one, and spreads it; the same bits everywhere.

    Operand k is the piece that the rank k places further on reduces; output k is the piece that
    the rank k places back has reduced.
    """
    (total,) = _swap_and_reduce(context, operands)
    return [total, *_spread(context, [total])]


def _doubling(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """all_reduce among 2**k ranks: in each step, ranks twice as far apart swap and combine.

    Every operation is commutative to the bit, so all ranks hold the same result.
    """
    import jax.numpy as jnp

    size, reducer, wire = context.num_ranks, context.reducer, context.wire
    assert reducer is not None
    assert size & (size - 1) == 0
    total = operands[0]
    distance = 1
    while distance < size:
        arrived = _permute(total, [(rank, rank ^ distance) for rank in range(size)])
        total = combine(reducer, wire, [total, arrived], jnp)
        distance *= 2
        if distance < size:
            total = total.astype(wire.name)  # travels in its own dtype
    return [finish(reducer, wire, total, size, jnp)]


def _gather_and_reduce(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """all_reduce for any operation and any number of ranks, combined in rank order everywhere."""
    import jax.numpy as jnp
    from jax import lax

    size, reducer = context.num_ranks, context.reducer
    assert reducer is not None
    rows = lax.all_gather(operands[0], AXIS)
    total = combine(reducer, context.wire, [rows[rank] for rank in range(size)], jnp)
    return [finish(reducer, context.wire, total, size, jnp)]


# --- absolute forms


def _tuned(context: FormContext, operand: Array) -> Array:
    assert context.tuned is not None
    form = context.tuned
    if context.root is not None:
        form = replace(form, root=context.order.index(context.root))
    return form.function()(operand)


def _by_place(context: FormContext, operands: Sequence[Array]) -> Array:
    """One flat array of the ranks' pieces, each at its rank's place."""
    import jax.numpy as jnp

    return jnp.concatenate([operands[rank] for rank in context.order])


def _by_rank(context: FormContext, gathered: Array) -> Sequence[Array]:
    rows = gathered.reshape(context.num_ranks, -1)
    return [rows[context.order.index(rank)] for rank in range(context.num_ranks)]


def _native_all_reduce(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    import jax.numpy as jnp

    reducer = context.reducer
    assert reducer is not None and reducer.native is not None
    assert context.tuned is not None
    context = replace(context, tuned=replace(context.tuned, reducer=reducer.native))
    total = _tuned(context, operands[0])
    return [finish(reducer, context.wire, total, context.num_ranks, jnp)]


def _native_all_gather(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    return _by_rank(context, _tuned(context, operands[0]))


def _native_reduce_scatter(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    import jax.numpy as jnp

    reducer = context.reducer
    assert reducer is not None
    total = _tuned(context, _by_place(context, operands))
    return [finish(reducer, context.wire, total, context.num_ranks, jnp)]


def _native_all_to_all(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    return _by_rank(context, _tuned(context, _by_place(context, operands)))


def _masked_sum(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """broadcast: the sum of the root's array and zeros; of integers, so that all bits stay."""
    return [_tuned(context, operands[0])]


def _masked_scatter(context: FormContext, operands: Sequence[Array]) -> Sequence[Array]:
    """scatter: a reduce_scatter of the root's pieces and zeros, likewise."""
    return [_tuned(context, _by_place(context, operands))]


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form(name="spread", build=_spread),
        Form(name="swap", build=_swap, pieces=True),
        Form(name="collect", build=_collect),
        Form(name="deal", build=_deal, pieces=True),
        Form(name="hop", build=_hop),
        Form(name="swap_and_reduce", build=_swap_and_reduce, pieces=True, own=True),
        Form(name="scatter_and_gather", build=_scatter_and_gather, pieces=True, own=True),
        Form(name="doubling", build=_doubling),
        Form(name="gather_and_reduce", build=_gather_and_reduce),
        Form(name="native_all_reduce", build=_native_all_reduce, relative=False, verb="all_reduce"),
        Form(name="native_all_gather", build=_native_all_gather, relative=False, verb="all_gather"),
        Form(
            name="native_reduce_scatter",
            build=_native_reduce_scatter,
            pieces=True,
            relative=False,
            verb="reduce_scatter",
        ),
        Form(
            name="native_all_to_all",
            build=_native_all_to_all,
            pieces=True,
            relative=False,
            verb="all_to_all",
        ),
        Form(name="masked_sum", build=_masked_sum, relative=False, verb="broadcast"),
        Form(
            name="masked_scatter",
            build=_masked_scatter,
            pieces=True,
            relative=False,
            verb="scatter",
            from_root=True,
        ),
    )
}
