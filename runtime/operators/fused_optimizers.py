"""Whole optimizer steps, `fused=True`: one program for all parameters.

What changes from step to step (lr, betas, the step's number) is traced: it compiles once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jax import numpy as jnp

from tpu_dist.runtime.operators.lowering import LOWERINGS, lower
from tpu_dist.runtime.operators.operator import Kernel, Operator
from tpu_dist.runtime.operators.writing_kernels import writing_kernel

Array = Any
Arrays = Sequence[Array]


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _unscaled(grad: Array, grad_scale: Array | None) -> Array:
    return grad if grad_scale is None else grad / grad_scale.astype(grad.dtype)


def _kept(found_inf: Array | None, old: Array, new: Array) -> Array:
    """The old value if some gradient was infinite: then the step is left out."""
    return new if found_inf is None else jnp.where(found_inf.reshape(()) != 0, old, new)


def _adam(
    params: Arrays,
    grads: Arrays,
    averages: Arrays,
    squares: Arrays,
    max_squares: Arrays,
    steps: Arrays,
    *,
    lr: Array,
    beta1: Array,
    beta2: Array,
    weight_decay: Array,
    eps: Array,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> tuple[list[Array], ...]:
    new: tuple[list[Array], ...] = ([], [], [], [], [])
    for place, param in enumerate(params):
        p, m, v = _wide(param), _wide(averages[place]), _wide(squares[place])
        rate, b1, b2 = lr.reshape(()).astype(p.dtype), beta1.astype(p.dtype), beta2.astype(p.dtype)
        decay, step = weight_decay.astype(p.dtype), steps[place].astype(p.dtype)
        unscaled = _unscaled(_wide(grads[place]), grad_scale)
        g = -unscaled if maximize else unscaled
        q = p * (1 - rate * decay) if decoupled else p
        if not decoupled:
            g = g + decay * p
        first = m + (1 - b1) * (g - m)
        second = b2 * v + (1 - b2) * g * g
        largest = second
        if amsgrad:
            largest = jnp.maximum(_wide(max_squares[place]), second)
            new[4].append(_kept(found_inf, max_squares[place], largest))
        size = jnp.sqrt(largest) / jnp.sqrt(1 - b2**step) + eps.astype(p.dtype)
        q = q - rate / (1 - b1**step) * first / size
        new[0].append(_kept(found_inf, p, q))
        new[1].append(grads[place] if grad_scale is None else unscaled)
        new[2].append(_kept(found_inf, m, first))
        new[3].append(_kept(found_inf, v, second))
    return new


def _on_cpu_as_number(kernel: Kernel) -> Kernel:
    """A learning rate of one element on the CPU is a number, whatever its shape."""

    def run(*args: Any, lr: torch.Tensor, **kwargs: Any) -> None:
        rate = lr.reshape(()) if lr.device.type == "cpu" else lr
        kernel(*args, lr=rate, **kwargs)

    return run


_TRACED = ("lr", "beta1", "beta2", "weight_decay", "eps", "dampening")


for _name, _decoupled in (("_fused_adam_", False), ("_fused_adamw_", True)):
    lower(_name, f"{_name}.tensor_lr", has_meta=False, traced=_TRACED)(
        functools.partial(_adam, decoupled=_decoupled)
    )


@lower("_fused_sgd_", "_fused_sgd_.tensor_lr", has_meta=False, traced=_TRACED)
def _sgd(
    params: Arrays,
    grads: Arrays,
    buffers: Arrays,
    *,
    weight_decay: Array,
    momentum: float,
    lr: Array,
    dampening: Array,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> tuple[list[Array], ...]:
    new: tuple[list[Array], ...] = ([], [], [])
    for place, param in enumerate(params):
        p = _wide(param)
        unscaled = _unscaled(_wide(grads[place]), grad_scale)
        g = (-unscaled if maximize else unscaled) + weight_decay.astype(p.dtype) * p
        if momentum:
            old = _wide(buffers[place])
            moved = g if is_first_step else old * momentum + (1 - dampening.astype(p.dtype)) * g
            new[2].append(_kept(found_inf, old, moved))
            g = g + momentum * moved if nesterov else moved
        new[0].append(_kept(found_inf, p, p - lr.reshape(()).astype(p.dtype) * g))
        new[1].append(grads[place] if grad_scale is None else unscaled)
    return new


def _with_tensor_rate(name: str) -> Kernel:
    overload = getattr(torch.ops.aten, name).tensor_lr
    return _on_cpu_as_number(writing_kernel(Operator(overload, LOWERINGS[f"{name}.tensor_lr"])))


KERNELS: Mapping[str, Kernel] = {
    f"{name}.tensor_lr": _with_tensor_rate(name)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
}
