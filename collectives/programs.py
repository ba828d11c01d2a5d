"""Compiled programs of one set of devices: compiled once for each key, then looked up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_dist.collectives.chunks import ExactSizes
from tpu_dist.collectives.dtypes import Kind, WireType, moving_wire
from tpu_dist.collectives.forms import AXIS, Form, FormContext
from tpu_dist.collectives.reducers import Reducer
from tpu_dist.collectives.tuned_forms import LANES, TILE_ROWS, TunedForm, flat_form
from tpu_dist.collectives.tuning import Case, tuned_forms
from tpu_dist.topology.placement import Placement

Array = Any
Program = Callable[[Sequence[Array]], Sequence[Array]]

_logger = logging.getLogger(__name__)

_TILE = LANES * TILE_ROWS  # elements


@dataclass(frozen=True, slots=True)
class _Key:
    form: str
    size: int
    wire: str
    reducer: str | None
    root: int | None
    step: int
    shape: tuple[int, ...] | None


class Programs:
    """The programs that run on `devices` together, one array of `size` elements a rank and operand.

    A program takes this process's shards and returns its shards; it blocks while the others have
    not started it. Thread-safe.
    """

    def __init__(
        self, devices: Sequence[Any], own: Any, placement: Placement | None = None
    ) -> None:
        """Compile nothing yet.

        Args:
            devices: of the ranks, by rank; or such lists of groups that run as one program.
            own: this process's.
            placement: where the devices stand, if that is known: absolute forms are tuned for it.
        """
        self._devices = tuple(devices)
        self._num_ranks = len(devices[0]) if isinstance(devices[0], list) else len(devices)
        self._own = own
        self.placement = placement
        self._cache: dict[_Key, Program] = {}
        self.exact_sizes = ExactSizes()
        self._compiling = threading.Lock()

    def get(
        self,
        form: Form,
        *,
        size: int,
        wire: WireType,
        reducer: Reducer | None = None,
        root: int | None = None,
        step: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> Program:
        """The program of `form` for flat arrays of `size` elements that cross as `wire.carrier`.

        With `shape`, which has as many elements, for arrays of that shape and the dtype itself, as
        tensors on the device have them: then nothing is copied before or after.
        """
        dtype = f"{wire.name} in {wire.carrier}"
        key = _Key(form.name, size, dtype, reducer.name if reducer else None, root, step, shape)
        program = self._cache.get(key)
        if program is None:
            with self._compiling:
                program = self._cache.get(key)
                if program is None:
                    context = FormContext(
                        num_ranks=self._num_ranks,
                        wire=wire,
                        reducer=reducer,
                        root=root,
                        step=step,
                    )
                    context = tune(form, size, context, self.placement)
                    compiled = compile_form(form, size, context, self._devices, shape)
                    program = _runner(compiled)
                    self._cache[key] = program
        return program


def tune(form: Form, size: int, context: FormContext, placement: Placement | None) -> FormContext:
    """Return the context with the tuned form in it, for forms that have one.

    Args:
        form: what is asked for.
        size: elements of an operand.
        context: of the form.
        placement: of the group; None where nothing is known of it: then it is XLA's own choice.
    """
    if form.verb is None:
        return context
    if placement is None:
        ranks = tuple(range(context.num_ranks))
        return replace(context, tuned=flat_form(form.verb, context.num_ranks), order=ranks)
    pieces = context.num_ranks if form.pieces or form.verb == "all_gather" else 1
    case = Case(
        verb=form.verb,
        placement=placement,
        dtype=context.wire.name,
        num_bytes=size * pieces * context.wire.carrier.itemsize,
    )
    return replace(context, tuned=tuned_forms(case)[0], order=placement.order)


def compile_form(
    form: Form,
    size: int,
    context: FormContext,
    devices: Sequence[Any],
    shape: tuple[int, ...] | None = None,
) -> Any:
    """Compile a form for these devices, which may be those of a slice that is not here.

    Args:
        form: what to compile.
        size: elements of an operand.
        context: of the form, as `tune` returns it.
        devices: of the ranks, by rank; or such lists of groups that run as one program.
        shape: of an operand, whose dtype is then the payload's own; None: it is flat, and of the
            dtype that carries it.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    num_ranks, wire, tuned = context.num_ranks, context.wire, context.tuned
    groups = np.array(devices).reshape(-1, num_ranks)
    sizes, names = ((num_ranks,), (AXIS,)) if tuned is None else (tuned.sizes, tuned.names)
    if tuned is not None:
        groups = groups[:, list(context.order)]
    if len(groups) > 1:
        sizes, names = (len(groups), *sizes), ("groups", *names)
    mesh = Mesh(groups.reshape(sizes), names)
    spec = PartitionSpec(names)

    local = shape or (size,)
    dtype = _carrier(wire) if shape is None else wire.name
    # What only moves must arrive bit by bit: some transports widen narrow floats.
    inside = wire.name if context.reducer or shape is None else _bits(form, wire)

    def run(*operands: Array) -> tuple[Array, ...]:
        shards = [_padded(_as(operand.reshape(-1), inside), tuned) for operand in operands]
        outputs = form.build(context, shards)
        return tuple(_as(output, dtype)[:size].reshape(local) for output in outputs)

    with jax.enable_x64(True):
        operand = jax.ShapeDtypeStruct(
            (groups.size * local[0], *local[1:]), dtype, sharding=NamedSharding(mesh, spec)
        )
        mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        operands = [operand] * form.num_operands(num_ranks)
        lowered = jax.jit(mapped, keep_unused=True).lower(*operands)
        if tuned is None or not tuned.options or groups.flat[0].platform != "tpu":
            return lowered.compile()
        try:
            return lowered.compile(compiler_options=dict(tuned.options))
        except jax.errors.JaxRuntimeError as error:  # another libtpu may not know an option
            _logger.warning("%s is compiled without options, which failed: %s", form.name, error)
            return lowered.compile()


def _runner(compiled: Any) -> Program:
    """Call the executable itself, on this process's shards.

    The jax.Array of the whole group is never built: making one costs 50 us a call, and nothing
    here needs more than the shard.
    """
    executable = compiled.runtime_executable()

    def run(shards: Sequence[Array]) -> Sequence[Array]:
        results = executable.execute_sharded(list(shards))
        outputs = [arrays[0] for arrays in results.disassemble_into_single_device_arrays()]
        for output in outputs:
            output.block_until_ready()
        return outputs

    return run


def _carrier(wire: WireType) -> str:
    return str(wire.carrier).removeprefix("torch.")


def _bits(form: Form, wire: WireType) -> str:
    """As what a form that only moves sees the elements; complex numbers as they are, if it can."""
    if form.verb in ("broadcast", "scatter"):
        return moving_wire(wire, by_sums=True).name
    if wire.kind is Kind.FLOAT:
        return f"uint{8 * wire.carrier.itemsize}"
    return _carrier(wire) if wire.kind is Kind.BOOL else wire.name


def _padded(array: Array, tuned: TunedForm | None) -> Array:
    """With zeros up to whole tiles, where the form wants rows."""
    import jax.numpy as jnp

    if tuned is None or tuned.lanes is None or array.size % _TILE == 0:
        return array
    return jnp.pad(array, (0, -array.size % _TILE))


def _as(array: Array, dtype: str) -> Array:
    """Reinterpret a flat array, as wide as it was or not; truth values cross as bytes."""
    import jax.numpy as jnp
    from jax import lax

    before, after = jnp.dtype(array.dtype), jnp.dtype(dtype)
    if before == after:
        return array
    if dtype == "bool":
        return array != 0
    if str(before) == "bool":
        return array.astype(dtype)
    if jnp.issubdtype(before, jnp.complexfloating):  # XLA reinterprets none
        return _as(jnp.stack((array.real, array.imag), -1).reshape(-1), dtype)
    if jnp.issubdtype(after, jnp.complexfloating):
        parts = _as(array, f"float{4 * after.itemsize}").reshape(-1, 2)
        return lax.complex(parts[:, 0], parts[:, 1])
    if after.itemsize > before.itemsize:
        array = array.reshape(-1, after.itemsize // before.itemsize)
    return lax.bitcast_convert_type(array, after).reshape(-1)
