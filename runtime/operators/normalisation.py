"""Normalisation over features, groups and batches; statistics are kept in at least float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import LOWERINGS, lower
from tpu_dist.runtime.operators.operator import Operator

Array = Any  # None where torch passes none
Tensor = torch.Tensor


def widened(x: Array) -> Array:
    """In at least float32; None stays None."""
    return None if x is None else x.astype(jnp.promote_types(x.dtype, jnp.float32))


def moments(x: Array, dims: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance over `dims`, which are kept with size 1."""
    mean = jnp.mean(x, dims, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), dims, keepdims=True)


@lower("native_layer_norm")
def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array, bias: Array, eps: float
) -> tuple[Array, Array, Array]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    mean, variance = moments(wide, dims)
    rstd = lax.rsqrt(variance + eps)
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * widened(weight)
    if bias is not None:
        y = y + widened(bias)
    return y, mean, rstd


@lower("native_layer_norm_backward")
def _layer_norm_backward(
    grad: Array,
    x: Array,
    shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array,
    bias: Array,
    output_mask: Sequence[bool],
) -> tuple[Array, ...]:
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    grad, mean, rstd = widened(grad), widened(mean), widened(rstd)
    normal = (widened(x) - mean) * rstd
    scaled = grad if weight is None else grad * widened(weight)
    along = jnp.mean(scaled * normal, inner, keepdims=True)
    dx = rstd * (scaled - jnp.mean(scaled, inner, keepdims=True) - normal * along)
    dw = jnp.sum(grad * normal, outer) if weight is not None else None
    db = jnp.sum(grad, outer) if bias is not None else None
    return tuple(g if m else None for g, m in zip((dx, dw, db), output_mask, strict=True))


@lower("native_group_norm")
def _group_norm(
    x: Array,
    weight: Array,
    bias: Array,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> tuple[Array, Array, Array]:
    wide = widened(x).reshape(n, group, -1)
    mean, variance = moments(wide, (2,))
    rstd = lax.rsqrt(variance + eps)
    y = ((wide - mean) * rstd).reshape(x.shape)
    per_channel = (1, c) + (1,) * (x.ndim - 2)
    if weight is not None:
        y = y * widened(weight).reshape(per_channel)
    if bias is not None:
        y = y + widened(bias).reshape(per_channel)
    return y, mean.reshape(n, group), rstd.reshape(n, group)


# --- batch norm: torch's schema does not say that it writes to the running statistics


def channels(x: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims that are reduced, and the shape of what is left, to broadcast."""
    return (0, *range(2, x.ndim)), (1, x.shape[1]) + (1,) * (x.ndim - 2)


@lower("_native_batch_norm_legit_functional", traced=("momentum",))
def _batch_norm(
    x: Array,
    weight: Array,
    bias: Array,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: Any,
    eps: float,
    *,
    meta: Any,
) -> tuple[Array, ...]:
    wide = widened(x)
    dims, shape = channels(x)
    new_mean, new_var = running_mean, running_var
    if training:
        mean, variance = moments(wide, dims)
        rstd = lax.rsqrt(variance + eps)
        saved: tuple[Array, ...] = (mean.reshape(-1), rstd.reshape(-1))
        count = x.size // x.shape[1]
        if running_mean is not None:
            new_mean = _moved(running_mean, mean.reshape(-1), momentum)
        if running_var is not None:
            unbiased = variance.reshape(-1) * (count / max(count - 1, 1))
            new_var = _moved(running_var, unbiased, momentum)
    else:
        mean = widened(running_mean).reshape(shape)
        rstd = lax.rsqrt(widened(running_var) + eps).reshape(shape)
        saved = tuple(jnp.zeros(tuple(m.shape), wide.dtype) for m in meta[1:3])
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * widened(weight).reshape(shape)
    if bias is not None:
        y = y + widened(bias).reshape(shape)
    return y, *saved, new_mean, new_var


def _moved(running: Array, new: Array, momentum: Any) -> Array:
    momentum = jnp.asarray(momentum).astype(new.dtype)
    return (1 - momentum) * running.astype(new.dtype) + momentum * new


@lower("native_batch_norm_backward")
def _batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    running_mean: Array,
    running_var: Array,
    saved_mean: Array,
    saved_rstd: Array,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Array, ...]:
    dims, shape = channels(x)
    grad, wide = widened(grad), widened(x)
    if train:
        mean, rstd = widened(saved_mean), widened(saved_rstd)
    else:
        mean, rstd = widened(running_mean), lax.rsqrt(widened(running_var) + eps)
    normal = (wide - mean.reshape(shape)) * rstd.reshape(shape)
    db = jnp.sum(grad, dims)
    dw = jnp.sum(grad * normal, dims)
    scale = rstd if weight is None else rstd * widened(weight)
    dx = grad * scale.reshape(shape)
    if train:
        count = x.size // x.shape[1]
        mean_grad = (db / count).reshape(shape)
        along = (dw / count).reshape(shape)
        dx = (grad - mean_grad - normal * along) * scale.reshape(shape)
    return tuple(g if m else None for g, m in zip((dx, dw, db), output_mask, strict=True))


_functional = torch.ops.aten._native_batch_norm_legit_functional.default
_no_stats = torch.ops.aten._native_batch_norm_legit.no_stats
_lowering = LOWERINGS["_native_batch_norm_legit_functional"]
_run_batch_norm = functional_kernel(Operator(_functional, _lowering))


@lower("_native_batch_norm_legit.no_stats", traced=("momentum",))
def _batch_norm_alone(
    x: Array, weight: Array, bias: Array, training: bool, momentum: Any, eps: float, *, meta: Any
) -> tuple[Array, ...]:
    y, mean, rstd, _, _ = _batch_norm(
        x, weight, bias, None, None, training, momentum, eps, meta=meta
    )
    return y, mean, rstd


_run_batch_norm_alone = functional_kernel(
    Operator(_no_stats, LOWERINGS["_native_batch_norm_legit.no_stats"])
)


def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm; in training the running statistics, if there are, are moved in place."""
    if running_mean is None or running_var is None:
        return _run_batch_norm_alone(input, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    results = _run_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    if training:
        running_mean.copy_(results[3])
        running_var.copy_(results[4])
    return results[:3]  # type: ignore[no-any-return]


KERNELS: Mapping[str, Callable[..., Any]] = {
    "native_batch_norm": native_batch_norm,
    "_native_batch_norm_legit": native_batch_norm,
}
