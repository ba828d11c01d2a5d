"""Random numbers. A draw's key is made of the generator's seed and offset, in its program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.operators.lowering import lower

Array = Any
Number = Any


def _key(words: Array) -> Array:
    """JAX's key for four words: seed and offset."""
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, words[2]), words[3])


def _real(dtype: Any) -> Any:
    return jnp.float64 if dtype.itemsize >= 8 and dtype.kind == "f" else jnp.float32


def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    if dtype.kind == "c":  # real and imaginary part share the variance
        return jax.random.normal(_key(key), shape, dtype)
    return jax.random.normal(_key(key), shape, _real(dtype))


def _uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """In [0, 1), also after it was rounded to `dtype`."""
    drawn = jax.random.uniform(_key(key), shape, _real(dtype))
    if dtype.name in ("float16", "bfloat16"):
        steps = {"float16": 2.0**11, "bfloat16": 2.0**8}[dtype.name]
        drawn = jnp.floor(drawn * steps) / steps
    return drawn


def _as(number: Number, like: Array) -> Array:
    return jnp.asarray(number).astype(like.dtype)


@lower("normal_", random=True, traced=("mean", "std"))
def _normal_into(x: Array, mean: Number = 0, std: Number = 1, *, key: Array) -> Array:
    drawn = _normal(key, x.shape, x.dtype)
    return drawn * _as(std, drawn) + _as(mean, drawn)


@lower("normal.Tensor_float", random=True, traced=("std",))
def _normal_around(mean: Array, std: Number = 1, *, key: Array) -> Array:
    drawn = _normal(key, mean.shape, mean.dtype)
    return drawn * _as(std, drawn) + mean


@lower("normal.float_Tensor", random=True, traced=("mean",))
def _normal_spread(mean: Number, std: Array, *, key: Array) -> Array:
    drawn = _normal(key, std.shape, std.dtype)
    return drawn * std + _as(mean, drawn)


@lower("normal.Tensor_Tensor", random=True)
def _normal_of(mean: Array, std: Array, *, key: Array) -> Array:
    shape = jnp.broadcast_shapes(mean.shape, std.shape)
    return _normal(key, shape, mean.dtype) * std + mean


@lower("uniform_", random=True, traced=("from", "to"))
def _uniform_into(x: Array, low: Number = 0, high: Number = 1, *, key: Array) -> Array:
    drawn = _uniform(key, x.shape, x.dtype)
    return drawn * (_as(high, drawn) - _as(low, drawn)) + _as(low, drawn)


def _integers(key: Array, shape: tuple[int, ...], low: int, high: int) -> Array:
    return jax.random.randint(_key(key), shape, low, high, jnp.int64)


@lower("random_.from", random=True)
def _random_between(x: Array, low: int, high: int | None = None, *, key: Array) -> Array:
    return _integers(key, x.shape, low, _largest(x.dtype) if high is None else high)


@lower("random_.to", random=True)
def _random_below(x: Array, high: int, *, key: Array) -> Array:
    return _integers(key, x.shape, 0, high)


@lower("random_", random=True)
def _random_any(x: Array, *, key: Array) -> Array:
    return _integers(key, x.shape, 0, _largest(x.dtype))


def _largest(dtype: Any) -> int:
    """One more than the largest integer that random_() draws for a dtype."""
    if dtype.kind == "b":
        return 2
    if dtype.kind in "iu":
        return min(int(jnp.iinfo(dtype).max), (1 << 62) - 1) + 1
    digits: int = jnp.finfo(dtype).nmant + 1
    return 1 << min(digits, 62)


@lower("bernoulli_.float", random=True, traced=("p",))
def _bernoulli_into(x: Array, p: Number = 0.5, *, key: Array) -> Array:
    return jax.random.uniform(_key(key), x.shape) < jnp.asarray(p).astype(jnp.float32)


@lower("bernoulli_.Tensor", random=True)
def _bernoulli_into_by(x: Array, p: Array, *, key: Array) -> Array:
    return jax.random.uniform(_key(key), x.shape) < p.astype(jnp.float32)


@lower("bernoulli", random=True)
def _bernoulli(x: Array, *, key: Array) -> Array:
    return jax.random.uniform(_key(key), x.shape) < x.astype(jnp.float32)


@lower("bernoulli.p", random=True, traced=("p",))
def _bernoulli_like(x: Array, p: Number, *, key: Array) -> Array:
    return _bernoulli_into(x, p, key=key)


@lower("native_dropout", random=True, traced=("p",))
def _dropout(x: Array, p: Number, train: bool | None, *, key: Array) -> tuple[Array, Array]:
    if train is False:
        return x, jnp.ones(x.shape, bool)
    p = jnp.asarray(p).astype(jnp.float32)
    kept = jax.random.uniform(_key(key), x.shape) >= p
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = jnp.where(p >= 1, 0, 1 / jnp.where(p >= 1, 1, 1 - p))
    return jnp.where(kept, wide * scale.astype(wide.dtype), 0), kept


@lower("native_dropout_backward", traced=("scale",))
def _dropout_backward(grad: Array, mask: Array, scale: Number) -> Array:
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    return wide * mask * jnp.asarray(scale).astype(wide.dtype)


def _open(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Uniform in (0, 1]."""
    return 1 - jax.random.uniform(_key(key), shape, _real(dtype))


@lower("exponential_", random=True, traced=("lambd",))
def _exponential(x: Array, lambd: Number = 1, *, key: Array) -> Array:
    drawn = -jnp.log(_open(key, x.shape, x.dtype))
    return jnp.maximum(drawn, jnp.finfo(drawn.dtype).tiny) / _as(lambd, drawn)


@lower("geometric_", random=True, traced=("p",))
def _geometric(x: Array, p: Number, *, key: Array) -> Array:
    drawn = _open(key, x.shape, x.dtype)
    return jnp.maximum(jnp.ceil(jnp.log(drawn) / jnp.log1p(-_as(p, drawn))), 1)


@lower("cauchy_", random=True, traced=("median", "sigma"))
def _cauchy(x: Array, median: Number = 0, sigma: Number = 1, *, key: Array) -> Array:
    drawn = jax.random.cauchy(_key(key), x.shape, _real(x.dtype))
    return drawn * _as(sigma, drawn) + _as(median, drawn)


@lower("log_normal_", random=True, traced=("mean", "std"))
def _log_normal(x: Array, mean: Number = 1, std: Number = 2, *, key: Array) -> Array:
    drawn = _normal(key, x.shape, x.dtype)
    return jnp.exp(drawn * _as(std, drawn) + _as(mean, drawn))


@lower("multinomial", random=True)
def _multinomial(probs: Array, num_samples: int, replacement: bool = False, *, key: Array) -> Array:
    weights = probs.astype(jnp.float32)
    shape = (*weights.shape[:-1], num_samples)
    if replacement:
        cumulative = jnp.cumsum(weights, -1)
        drawn = jax.random.uniform(_key(key), shape) * cumulative[..., -1:]
        below = cumulative[..., None, :] <= drawn[..., None]
        return jnp.minimum(jnp.sum(below, -1), weights.shape[-1] - 1).astype(jnp.int64)
    # The largest of weight / exponential are a draw without replacement.
    exponential = -jnp.log(1 - jax.random.uniform(_key(key), weights.shape))
    race = weights / jnp.maximum(exponential, jnp.finfo(jnp.float32).tiny)
    return lax.top_k(race, num_samples)[1].astype(jnp.int64)


def _randperm_out(n: int, *, generator: Any = None, out: torch.Tensor) -> torch.Tensor:
    """A random order of 0 to n - 1, by sorting random numbers."""
    order = torch.rand(n, generator=generator, device=out.device).argsort()
    return out.resize_(n).copy_(order)


KERNELS: Mapping[str, Callable[..., Any]] = {"randperm.generator_out": _randperm_out}
