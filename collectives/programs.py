"""Compiled programs of one set of devices: compiled once for each key, then looked up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_dist.collectives.dtypes import WireType
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


class Programs:
    """The programs that run on `devices` together, one array of `size` elements a rank and operand.

    A program takes this process's shards and returns its shards; it blocks while the others have
    not started it. Thread-safe.
    """

    def __init__(self, devices: Sequence[Any], own: Any) -> None:
        self._devices = tuple(devices)
        self._own = own
        self._cache: dict[_Key, Program] = {}
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
    ) -> Program:
        """The program of `form` for flat arrays of `size` elements that cross as `wire.carrier`."""
        key = _Key(form.name, size, wire.name, reducer.name if reducer else None, root, step)
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
                    program = self._compile(form, size, context)
                    self._cache[key] = program
        return program

    def _compile(self, form: Form, size: int, context: FormContext) -> Program:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        num_ranks, wire = context.num_ranks, context.wire
        mesh = Mesh(np.array(self._devices), (AXIS,))
        spec = PartitionSpec(AXIS)

        def run(*operands: Array) -> tuple[Array, ...]:
            shards = [_as(operand, wire.name) for operand in operands]
            return tuple(_as(output, _carrier(wire)) for output in form.build(context, shards))

        with jax.enable_x64(True):
            operand = jax.ShapeDtypeStruct(
                (num_ranks * size,), _carrier(wire), sharding=NamedSharding(mesh, spec)
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
