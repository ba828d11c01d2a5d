"""Operators on lists of tensors: one program for the whole list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tpu_dist.runtime.operators import (
    pointwise,  # noqa: F401  their lowerings are used here
    pointwise_unary,  # noqa: F401
    reductions,
)
from tpu_dist.runtime.operators.evaluate import evaluate
from tpu_dist.runtime.operators.lowering import LOWERINGS, lower

Array = Any

_UNARY = ("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp",
          "expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal",
          "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh",
          "trunc")  # fmt: skip

# A list's operator: the operator that each element is, for the overloads named.
_BINARY: Mapping[str, tuple[str, Sequence[str]]] = {
    "add": ("add.Tensor", ("Scalar", "List", "ScalarList", "Tensor")),
    "sub": ("sub.Tensor", ("Scalar", "List", "ScalarList")),
    "mul": ("mul.Tensor", ("Scalar", "List", "ScalarList", "Tensor")),
    "div": ("div.Tensor", ("Scalar", "List", "ScalarList", "Tensor")),
    "clamp_max": ("minimum", ("Scalar", "List", "ScalarList")),
    "clamp_min": ("maximum", ("Scalar", "List", "ScalarList")),
    "maximum": ("maximum", ("Scalar", "List", "ScalarList")),
    "minimum": ("minimum", ("Scalar", "List", "ScalarList")),
    "pow": ("pow.Tensor_Tensor", ("Scalar", "List", "ScalarList")),
    "lerp": ("lerp.Tensor", ("List", "Scalar", "ScalarList")),
}


def _each(base: str) -> Callable[..., list[Array]]:
    """The lowering of a list's operator: `base` for each place of the lists."""

    def run(arrays: Sequence[Array], meta: Any, *args: Any, **kwargs: Any) -> list[Array]:
        lowering = LOWERINGS[base]
        results = []
        for place in range(len(args[0])):
            own = [value[place] if isinstance(value, list) else value for value in args]
            named = {k: v[place] if isinstance(v, list) else v for k, v in kwargs.items()}
            results.append(evaluate(lowering, own, named, meta[place], arrays))
        return results

    return run


for _name in _UNARY:
    lower(f"_foreach_{_name}", on_leaves=True)(_each(_name))
for _name, (_base, _overloads) in _BINARY.items():
    for _overload in _overloads:
        lower(f"_foreach_{_name}.{_overload}", on_leaves=True)(_each(_base))


def _with_value(base: str) -> Callable[..., list[Array]]:
    """Addcmul and addcdiv take by name what their lists' operators take by position."""
    each = _each(base)

    def run(
        arrays: Sequence[Array], meta: Any, xs: Any, firsts: Any, seconds: Any, value: Any = 1
    ) -> list[Array]:
        return each(arrays, meta, xs, firsts, seconds, value=value)

    return run


for _name in ("addcmul", "addcdiv"):
    for _overload in ("Scalar", "ScalarList"):
        lower(f"_foreach_{_name}.{_overload}", on_leaves=True)(_with_value(_name))


@lower("_foreach_norm.Scalar", on_leaves=True, static=("ord",))
def _norms(
    arrays: Sequence[Array],
    meta: Any,
    tensors: Sequence[Any],
    order: Any = 2,
    dtype: torch.dtype | None = None,
) -> list[Array]:
    return [
        reductions.foreach_norm(leaf.read(arrays), float(order), leaf.dtype) for leaf in tensors
    ]


@lower("_foreach_copy", on_leaves=True)
def _copies(
    arrays: Sequence[Array], meta: Any, tensors: Any, sources: Sequence[Any], *rest: Any
) -> list[Array]:
    return [leaf.read(arrays) for leaf in sources]


@lower("_foreach_zero", on_leaves=True)
def _zeros(arrays: Sequence[Array], meta: Any, tensors: Sequence[Any]) -> list[Array]:
    from jax import numpy as jnp

    return [jnp.zeros(leaf.size, leaf.read(arrays).dtype) for leaf in tensors]
