"""What a lowering is handed: operands read from their arrays, and cast as torch promotes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpu_dist.runtime.device.dtypes import TO_ARRAY
from tpu_dist.runtime.operators.lowering import Cast, Lowering
from tpu_dist.runtime.operators.templates import Leaf, View, as_meta, flatten, leaves, map_leaves

Array = Any

# Arithmetic on narrow floats is done wide and rounded once, as torch does it.
_WIDE: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which arithmetic on `dtype` is done."""
    return _WIDE.get(dtype, dtype)


def evaluate(
    lowering: Lowering,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    natural: Any,
    arrays: Sequence[Array],
    key: Array = None,
) -> Any:
    """Call a lowering's function.

    Args:
        lowering: whose.
        args: all positional arguments of the operator, with leaves for tensors and numbers.
        kwargs: those keyword arguments that were given.
        natural: meta tensors like the result; None if torch does not know.
        arrays: the operands.
        key: for random numbers.
    """
    if lowering.on_leaves:
        return lowering.function(arrays, natural, *args, **kwargs)
    dtype = _cast_dtype(lowering, args, kwargs, natural)

    def value(leaf: Leaf) -> Array:
        return leaf.read(arrays) if isinstance(leaf, View) else arrays[leaf.operand]

    def cast(leaf: Leaf) -> Array:
        array = value(leaf)
        if dtype is None or array.dtype == TO_ARRAY[dtype]:
            return array
        if array.dtype.kind == "c" and TO_ARRAY[dtype].kind != "c":
            array = array.real
        return array.astype(TO_ARRAY[dtype])

    values = [
        map_leaves(arg, value if place in lowering.keep else cast) for place, arg in enumerate(args)
    ]
    named = {name: map_leaves(arg, cast) for name, arg in kwargs.items()}
    if natural is not None:
        named["meta"] = natural
    if lowering.random:
        named["key"] = key
    return _call(lowering, values, named)


def _call(lowering: Lowering, values: list[Any], named: dict[str, Any]) -> Any:
    parameters = lowering.parameters
    kinds = [p.kind for p in parameters.values()]
    if any(kind is kind.VAR_KEYWORD for kind in kinds):
        named = {k: v for k, v in named.items() if k not in ("meta", "key")}
        return lowering.function(*values, **named)
    if all(kind is not kind.VAR_POSITIONAL for kind in kinds):
        room = sum(
            kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) and name not in named
            for name, kind in zip(parameters, kinds, strict=True)
        )
        values = values[:room]
    return lowering.function(*values, **{k: v for k, v in named.items() if k in parameters})


def _cast_dtype(
    lowering: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], natural: Any
) -> torch.dtype | None:
    if lowering.cast is Cast.NONE:
        return None
    if lowering.cast is Cast.RESULT:
        metas = [meta for meta in flatten(natural) if meta is not None]
        return compute_dtype(metas[0].dtype)
    found = [
        as_meta(leaf)
        for place, arg in enumerate(args)
        if place not in lowering.keep
        for leaf in leaves(arg)
    ]
    return compute_dtype(_promoted(found))


def _promoted(values: Sequence[Any]) -> torch.dtype:
    """What torch promotes these tensors and numbers to."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values) == 1:
        return tensors[0].dtype
    result = values[0]
    for other in values[1:]:
        dtype = torch.result_type(result, other)
        dims = max(v.dim() if isinstance(v, torch.Tensor) else 0 for v in (result, other))
        result = torch.empty((1,) * dims, dtype=dtype, device="meta")
    return result.dtype if isinstance(result, torch.Tensor) else torch.result_type(result, result)
