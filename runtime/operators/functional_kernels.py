"""Kernels of operators that make their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_dist.runtime.device.box import Box
from tpu_dist.runtime.device.dtypes import TO_TORCH
from tpu_dist.runtime.device.geometry import in_storage_order
from tpu_dist.runtime.device.modes import is_blocking, precision_key
from tpu_dist.runtime.device.tensors import create_empty, wrap
from tpu_dist.runtime.operators.arguments import collect
from tpu_dist.runtime.operators.fallback import fall_back
from tpu_dist.runtime.operators.operator import (
    REFUSED,
    Kernel,
    Operator,
    refused,
    unconjugated,
)
from tpu_dist.runtime.operators.programs import TRACING, NotLowered, Output, Program
from tpu_dist.runtime.operators.results import as_result
from tpu_dist.runtime.operators.templates import flatten, rebuild

Array = Any


def functional_kernel(operator: Operator) -> Kernel:
    """The kernel of an operator that makes its results."""
    programs = operator.programs
    lowering = operator.lowering
    multiplies = lowering.multiplies
    kinds = operator.kinds
    special = lowering.random or lowering.checks is not None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if multiplies and args[0].is_complex():  # torch leaves conjugation to these
            args = tuple([unconjugated(value) for value in args])
        if TRACING.depth:
            return _trace(operator, args, kwargs)
        key: list[Any] = []
        operands: list[Array] = []
        if kwargs:
            key, operands = operator.collect(args, kwargs)
        else:  # as operator.collect() does
            collect(args, kinds, key, operands, None)
            if multiplies:
                key.append(precision_key())
        index = tuple(key)
        program = programs.get(index)
        if special:
            if lowering.random:
                operands.append(operator.key_operand(args, kwargs))
        if program is None:
            program = programs[index] = _build(operator, args, kwargs, operands)
        if program.run is refused:
            return fall_back(operator.overload, *args, **kwargs)
        arrays = program.run(*operands)
        if is_blocking():
            operator.wait(arrays, args)
        if program.has_flag:
            operator.report(arrays[-1], args, kwargs)
        outputs = program.outputs
        if len(outputs) == 1 and program.shape is None:
            output = outputs[0]
            if output is not None and output.stride is None:
                tensor = create_empty(output.size, output.dtype)
                box = Box(arrays[0], output.dtype, output.nbytes)
                tensor.untyped_storage()._tpu = box  # type: ignore[attr-defined]
                return tensor
        return _take(arrays, outputs, program.shape)

    return kernel


def _build(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], operands: list[Array]
) -> Program:
    try:
        results, natural, _ = operator.evaluator(args, kwargs)
    except NotLowered:
        return REFUSED
    outputs: list[Output | None] = []
    has_flag = False

    def run(*arrays: Array) -> tuple[Array, ...]:
        nonlocal has_flag
        values, flag = results(arrays)
        outputs[:] = _outputs(values, natural, operator.name)
        laid = [_lay(v, o) for v, o in zip(values, outputs, strict=True) if o is not None]
        has_flag = flag is not None
        return (*laid, flag) if has_flag else tuple(laid)

    compiled = operator.compile(run, operands)
    if compiled is refused:
        return REFUSED
    shape = natural if isinstance(natural, (list, tuple)) else None
    return Program(compiled, tuple(outputs), shape, has_flag=has_flag)


def _trace(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if operator.lowering.random:
        raise NotLowered(f"{operator.name} draws random numbers inside a decomposition")
    _, operands = operator.collect(args, kwargs)
    results, natural, _ = operator.evaluator(args, kwargs)
    values, _ = results(operands)
    outputs = _outputs(values, natural, operator.name)
    laid = [_lay(v, o) for v, o in zip(values, outputs, strict=True) if o is not None]
    return _take(laid, outputs, natural if isinstance(natural, (list, tuple)) else None)


def _outputs(values: Sequence[Array], natural: Any, name: str) -> list[Output | None]:
    """What tensors the results become: as torch's meta kernel says, else as they are."""
    if natural is None:
        return [None if v is None else Output(v.shape, TO_TORCH[v.dtype], None) for v in values]
    metas = flatten(natural)
    if len(metas) != len(values):
        raise AssertionError(f"{name}: the lowering returns {len(values)}, torch {len(metas)}")
    return [
        None if meta is None or value is None else Output.like(meta)
        for meta, value in zip(metas, values, strict=True)
    ]


def _lay(value: Array, output: Output) -> Array:
    """A result in the order in which its tensor's storage has it."""
    value = as_result(value, output.size, output.dtype)
    if output.stride is None:
        return value
    return in_storage_order(value, output.size, output.stride)


def _take(arrays: Sequence[Array], outputs: Sequence[Output | None], shape: Any) -> Any:
    """Tensors around a program's results."""
    iterator = iter(arrays)
    tensors = [
        None if output is None else wrap(next(iterator), output.dtype, output.size, output.stride)
        for output in outputs
    ]
    if shape is None:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
    return rebuild(shape, tensors)
