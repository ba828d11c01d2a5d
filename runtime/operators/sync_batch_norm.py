"""The pieces of torch.nn.SyncBatchNorm; between them it gathers and sums over the ranks.

Statistics are kept in at least float32. torch has no kernels for them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import LOWERINGS, lower
from tpu_dist.runtime.operators.normalisation import channels, moments, widened
from tpu_dist.runtime.operators.operator import Operator

Array = Any  # None where torch passes none
Tensor = torch.Tensor


@lower("batch_norm_stats", has_meta=False)
def _stats(x: Array, eps: float) -> tuple[Array, Array]:
    dims, _ = channels(x)
    mean, variance = moments(widened(x), dims)
    return mean.reshape(-1), lax.rsqrt(variance + eps).reshape(-1)


@lower("batch_norm_elemt", has_meta=False)
def _normalise(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, eps: float) -> Array:
    _, shape = channels(x)
    y = (widened(x) - widened(mean).reshape(shape)) * widened(rstd).reshape(shape)
    if weight is not None:
        y = y * widened(weight).reshape(shape)
    if bias is not None:
        y = y + widened(bias).reshape(shape)
    return y.astype(x.dtype)


@lower("batch_norm_gather_stats_with_counts", has_meta=False)
def _combine(
    x: Array,
    means: Array,
    rstds: Array,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
    counts: Array,
) -> tuple[Array, Array]:
    """Mean and 1/std of all ranks' values, of each rank's, (ranks, channels), and counts."""
    share = (widened(counts) / jnp.sum(widened(counts))).reshape(-1, 1)
    means, rstds = widened(means), widened(rstds)
    mean = jnp.sum(share * means, 0)
    variances = jnp.square(1 / rstds) - eps
    variance = jnp.sum(share * (variances + jnp.square(means - mean)), 0)
    return mean, lax.rsqrt(variance + eps)


_run_combine = functional_kernel(
    Operator(
        torch.ops.aten.batch_norm_gather_stats_with_counts.default,
        LOWERINGS["batch_norm_gather_stats_with_counts"],
    )
)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """See _combine; the running statistics, if there are, are moved in place."""
    together = _run_combine(input, mean, invstd, None, None, momentum, eps, counts)
    if running_mean is not None:
        running_mean.lerp_(together[0].to(running_mean.dtype), momentum)
    if running_var is not None:
        total = counts.sum()
        unbiased = (together[1].pow(-2) - eps) * (total / (total - 1).clamp(min=1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return together  # type: ignore[no-any-return]


@lower("batch_norm_backward_reduce", has_meta=False)
def _reduce_gradients(
    grad: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Array, ...]:
    dims, shape = channels(x)
    total = jnp.sum(widened(grad), dims)
    along = jnp.sum(widened(grad) * (widened(x) - widened(mean).reshape(shape)), dims)
    of_weight = x.dtype if weight is None else weight.dtype
    return (
        total if wants_input else None,
        along if wants_input else None,
        (along * widened(rstd)).astype(of_weight) if wants_weight else None,
        total.astype(of_weight) if wants_bias else None,
    )


@lower("batch_norm_backward_elemt", has_meta=False)
def _input_gradient(
    grad: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array,
    total: Array,
    along: Array,
    counts: Array,
) -> Array:
    _, shape = channels(x)
    mean, rstd = widened(mean).reshape(shape), widened(rstd).reshape(shape)
    number = jnp.sum(counts).astype(mean.dtype)
    mean_grad = (widened(total) / number).reshape(shape)
    slope = (widened(along) / number).reshape(shape) * jnp.square(rstd)
    scale = rstd if weight is None else rstd * widened(weight).reshape(shape)
    dx = (widened(grad) - mean_grad - (widened(x) - mean) * slope) * scale
    return dx.astype(x.dtype)


KERNELS: Mapping[str, Callable[..., Any]] = {
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
}
