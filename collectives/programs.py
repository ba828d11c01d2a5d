"""Compiled programs of one set of devices: compiled once for each key, then looked up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_dist.collectives.chunks import ExactSizes
from tpu_dist.collectives.dtypes import Kind, WireType
from tpu_dist.collectives.forms import AXIS, Form, FormContext
from tpu_dist.collectives.reducers import Reducer

Array = Any
Program = Callable[[Sequence[Array]], Sequence[Array]]


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

    def __init__(self, devices: Sequence[Any], own: Any) -> None:
        self._devices = tuple(devices)
        self._own = own
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
        named = reducer.name if reducer else None
        key = _Key(form.name, size, wire.name, named, root, step, shape)
        program = self._cache.get(key)
        if program is None:
            with self._compiling:
                program = self._cache.get(key)
                if program is None:
                    context = FormContext(
                        num_ranks=len(self._devices),
                        wire=wire,
                        reducer=reducer,
                        root=root,
                        step=step,
                    )
                    program = self._compile(form, size, context, shape)
                    self._cache[key] = program
        return program

    def _compile(
        self, form: Form, size: int, context: FormContext, shape: tuple[int, ...] | None
    ) -> Program:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        num_ranks, wire = context.num_ranks, context.wire
        mesh = Mesh(np.array(self._devices), (AXIS,))
        spec = PartitionSpec(AXIS)

        local = shape or (size,)
        dtype = _carrier(wire) if shape is None else wire.name
        # What only moves must arrive bit by bit: some transports widen narrow floats.
        inside = wire.name if context.reducer or shape is None else _bits(wire)

        def run(*operands: Array) -> tuple[Array, ...]:
            shards = [_as(operand.reshape(-1), inside) for operand in operands]
            outputs = form.build(context, shards)
            return tuple(_as(output, dtype).reshape(local) for output in outputs)

        with jax.enable_x64(True):
            operand = jax.ShapeDtypeStruct(
                (num_ranks * local[0], *local[1:]), dtype, sharding=NamedSharding(mesh, spec)
            )
            mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            operands = [operand] * form.num_operands(num_ranks)
            compiled = jax.jit(mapped, keep_unused=True).lower(*operands).compile()
        return _runner(compiled)


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


def _bits(wire: WireType) -> str:
    """An integer dtype of the same width; complex numbers are as they are."""
    if wire.kind is Kind.FLOAT:
        return f"uint{8 * wire.carrier.itemsize}"
    return _carrier(wire) if wire.kind is Kind.BOOL else wire.name


def _as(array: Array, dtype: str) -> Array:
    """Reinterpret; truth values cross as bytes."""
    from jax import lax

    if str(array.dtype) == dtype:
        return array
    if dtype == "bool":
        return array != 0
    if str(array.dtype) == "bool":
        return array.astype(dtype)
    return lax.bitcast_convert_type(array, dtype)
