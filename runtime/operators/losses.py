"""Losses that training leans on; torch decomposes the others."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from tpu_dist.runtime.device.transfer import to_host
from tpu_dist.runtime.operators.lowering import Cast, lower

Array = Any
_NONE, _MEAN, _SUM = range(3)


def _target_error(self: Any, target: Any, *rest: Any, **named: Any) -> Exception:
    ignored = rest[2] if len(rest) > 2 else named.get("ignore_index", -100)
    values = to_host(target).reshape(-1)
    classes = self.shape[1] if self.dim() > 1 else self.shape[0]
    wrong = values[((values < 0) | (values >= classes)) & (values != ignored)]
    return IndexError(f"Target {int(wrong[0]) if wrong.numel() else '?'} is out of bounds.")


def _picked(target: Array, weight: Array | None, ignored: int, classes: int) -> tuple[Any, ...]:
    """Which targets count, the class of each, what each weighs, and whether one is no class."""
    counts = target != ignored
    flag = jnp.any(counts & ((target < 0) | (target >= classes)))
    safe = jnp.where(counts, target, 0)
    weights = counts.astype(jnp.float32) if weight is None else jnp.where(counts, weight[safe], 0)
    return safe, weights, flag


@lower("nll_loss_forward", "nll_loss2d_forward", checks=_target_error)
def _nll_loss(
    x: Array, target: Array, weight: Array | None, reduction: int, ignored: int
) -> tuple[tuple[Array, Array], Array]:
    dim = 1 if x.ndim > 1 else 0
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    safe, weights, flag = _picked(target, weight, ignored, x.shape[dim])
    weights = weights.astype(wide.dtype)
    picked = jnp.take_along_axis(wide, jnp.expand_dims(safe, dim), dim, mode="clip").squeeze(dim)
    losses = jnp.where(weights == 0, 0, -picked * weights)
    total = jnp.sum(weights)
    if reduction == _NONE:
        return (losses, jnp.zeros((), wide.dtype)), flag
    loss = jnp.sum(losses)
    return (loss / total if reduction == _MEAN else loss, total), flag


@lower("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(
    grad: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignored: int,
    total: Array,
) -> Array:
    dim = 1 if x.ndim > 1 else 0
    safe, weights, _ = _picked(target, weight, ignored, x.shape[dim])
    grad = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    if reduction == _MEAN:
        grad = grad / total
    per_target = -(grad * weights.astype(grad.dtype))
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    hit = jnp.expand_dims(safe, dim) == jnp.arange(x.shape[dim]).reshape(shape)
    return jnp.where(hit, jnp.expand_dims(per_target, dim), 0)


def _reduced(losses: Array, reduction: int) -> Array:
    return {_NONE: lambda x: x, _MEAN: jnp.mean, _SUM: jnp.sum}[reduction](losses)


@lower("mse_loss", cast=Cast.RESULT)
def _mse_loss(x: Array, target: Array, reduction: int = _MEAN) -> Array:
    return _reduced(jnp.square(x - target), reduction)


@lower("mse_loss_backward", cast=Cast.RESULT)
def _mse_loss_backward(grad: Array, x: Array, target: Array, reduction: int) -> Array:
    size = jnp.broadcast_shapes(x.shape, target.shape)
    count = 1
    for length in size:
        count *= length
    scale = 2 / count if reduction == _MEAN else 2.0
    return scale * (x - target) * grad
