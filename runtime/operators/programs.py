"""Programs: XLA executables for one operator with operands of one kind, and how they are made."""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from tpu_dist.runtime.device.modes import matmul_precision
from tpu_dist.runtime.device.place import on_forget, place
from tpu_dist.runtime.operators.counters import COUNTERS

Array = Any

_logger = logging.getLogger(__name__)


_caches: list[dict[Any, Any]] = []


def program_cache() -> dict[Any, Any]:
    """A dictionary for what is of no use on another device; emptied when the device goes."""
    cache: dict[Any, Any] = {}
    _caches.append(cache)
    return cache


@on_forget
def empty_caches() -> None:
    """Forget all programs."""
    for cache in _caches:
        cache.clear()


class NotLowered(NotImplementedError):
    """This case of an operator has no lowering; it runs on the CPU."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a program makes; stride None: contiguous."""

    size: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.size) * self.dtype.itemsize)

    @staticmethod
    def like(meta: torch.Tensor) -> Output:
        """The geometry that a meta tensor has."""
        stride = None if meta.is_contiguous() else tuple(meta.stride())
        return Output(tuple(meta.shape), meta.dtype, stride)


@dataclass(slots=True)
class Program:
    """A compiled program.

    Attributes:
        run: takes the operands, returns the arrays, a tuple.
        outputs: of a functional operator, one for each array; of a writing one, none.
        shape: nested lists of placeholders, to build the operator's result from.
        dtypes: of a writing operator: of the storages it wrote to, in order of their arrays.
        has_flag: whether one more array, the last, says that an input was wrong.
    """

    run: Callable[..., tuple[Array, ...]]
    outputs: Sequence[Output | None]
    shape: Any
    dtypes: Sequence[torch.dtype] = ()
    has_flag: bool = False


class _Tracing(threading.local):
    depth = 0


TRACING = _Tracing()
"""Its depth is how many traces this thread is in."""


def is_tracing() -> bool:
    """Whether operators on this thread are being traced into a program, not run."""
    return TRACING.depth > 0


@contextmanager
def tracing() -> Iterator[None]:
    """Trace operators that are called in the block: their tensors hold tracers."""
    TRACING.depth += 1
    try:
        yield
    finally:
        TRACING.depth -= 1


def compile_program(
    function: Callable[..., tuple[Array, ...]],
    operands: Sequence[Array],
    donated: Sequence[int] = (),
) -> Callable[..., tuple[Array, ...]]:
    """Compile `function` for operands like these, with 64-bit dtypes as they are.

    What is returned is called with arrays and returns arrays. JAX's own defaults are not touched:
    they are set for the length of the tracing alone, on this thread.
    """
    home = place()
    shapes = [
        jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=home.sharding)
        for operand in operands
    ]
    with (
        warnings.catch_warnings(),
        jax.enable_x64(True),
        jax.default_matmul_precision(matmul_precision().value),
    ):
        # What is donated is of no more use, also where no result fits into it.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        jitted = jax.jit(
            function,
            donate_argnums=tuple(donated),
            keep_unused=True,
            out_shardings=home.sharding,
        )
        compiled = jitted.lower(*shapes).compile()
    COUNTERS.programs += 1
    return _runner(compiled, operands)


def _runner(compiled: Any, operands: Sequence[Array]) -> Callable[..., tuple[Array, ...]]:
    """What calls the executable with the least between.

    JAX's own call, in C++, casts 64-bit operands to 32 bits wherever the user's JAX has not enabled
    them: where there are some, the executable itself is called, which costs 2 us more.
    """
    constants = [place().put(np.asarray(c)) for c in compiled._params.const_args]
    if not constants and not any(operand.dtype in _WIDE for operand in operands):
        # What Compiled.__call__ comes to at its second call (jax 0.10).
        call = compiled._executable.create_cpp_call(compiled._params)
        if call is not None:
            return call  # type: ignore[no-any-return]
    execute = compiled.runtime_executable().execute_sharded

    def run(*operands: Array) -> tuple[Array, ...]:
        results = execute([*constants, *operands]).disassemble_into_single_device_arrays()
        return tuple([shards[0] for shards in results])

    return run


_WIDE = frozenset(np.dtype(n) for n in ("int64", "uint64", "float64", "complex128"))
