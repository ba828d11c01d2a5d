"""Operators that torch itself writes in terms of others: traced into one program with those.

The decomposition runs on tensors of the device that hold tracers; each operator in it adds its own
lowering to the trace.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_dist.runtime.device.tensors import wrap_plain
from tpu_dist.runtime.operators.lowering import Lowering
from tpu_dist.runtime.operators.programs import tracing

# Their decompositions look at values, draw random numbers, or write to their arguments.
_NOT = frozenset(
    {
        "aten.rrelu_with_noise.default",
        "aten.rrelu_with_noise_functional.default",
        "aten.normal_functional.default",
        "aten.empty_like.default",
        "aten.grid_sampler_2d.default",  # computes places in bfloat16, if that is its dtype
    }
)


def decomposed(op: Any) -> Lowering | None:
    """A lowering of `op` by its decomposition; None if torch has none."""
    from torch._decomp import decomposition_table

    schema = op._schema
    function = decomposition_table.get(op)
    if function is None or str(op) in _NOT or schema.is_mutable:
        return None
    if not schema.returns or any(r.alias_info is not None for r in schema.returns):
        return None

    def run(*values: Any, **kwargs: Any) -> Any:
        from jax import numpy as jnp

        def to_tensor(value: Any) -> Any:
            if hasattr(value, "aval"):
                return wrap_plain(value)
            if isinstance(value, list):
                return [to_tensor(item) for item in value]
            return value

        def to_array(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                from tpu_dist.runtime.operators.reading import read_view

                if value.device.type == "cpu":
                    return jnp.asarray(value.numpy())
                return read_view(value)
            if isinstance(value, (list, tuple)):
                return [to_array(item) for item in value]
            return value

        with tracing():
            named = {name: to_tensor(value) for name, value in kwargs.items()}
            return to_array(function(*[to_tensor(value) for value in values], **named))

    return Lowering(name=str(op), function=run, static=frozenset({"*"}))
