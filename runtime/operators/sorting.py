"""Orders: NaN is the largest, as torch has it."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from tpu_dist.runtime.operators.lowering import lower

Array = Any


def _order(x: Array, dim: int, descending: bool) -> Array:
    """The stable order along `dim`."""
    if not descending:
        return jnp.argsort(x, axis=dim, stable=True)
    backwards = jnp.argsort(jnp.flip(x, dim), axis=dim, stable=True)
    return x.shape[dim] - 1 - jnp.flip(backwards, dim)


def _sorted(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    order = _order(x, dim, descending)
    return jnp.take_along_axis(x, order, dim), order


@lower("sort.stable")
def _sort_stable(
    x: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    return _sorted(x, dim, descending)


@lower("sort")
def _sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return _sorted(x, dim, descending)


@lower("argsort", "argsort.stable")
def _argsort(x: Array, dim: int = -1, descending: bool = False, **named: Any) -> Array:
    return _sorted(x, dim, descending)[1]


@lower("topk")
def _topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    values, order = _sorted(x, dim, largest)
    cut = (slice(None),) * (dim % x.ndim) + (slice(0, k),)
    return values[cut], order[cut]


@lower("kthvalue")
def _kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    values, order = _sorted(x, dim, False)
    cut = (slice(None),) * (dim % x.ndim) + (slice(k - 1, k),)
    found = values[cut], order[cut]
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _median_place(x: Array, dim: int, skips_nan: bool) -> Array:
    """The place, in ascending order along `dim`, of the lower median, or of a NaN."""
    count = x.shape[dim]
    if x.dtype.kind in "iub":
        return jnp.full(x.sum(dim, keepdims=True).shape, (count - 1) // 2)
    nans = jnp.sum(jnp.isnan(x), dim, keepdims=True)
    if skips_nan:
        return jnp.maximum(count - nans - 1, 0) // 2
    return jnp.where(nans > 0, count - nans, (count - 1) // 2)


def _median(x: Array, dim: int, keepdim: bool, skips_nan: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    values, order = _sorted(x, dim, False)
    place = _median_place(x, dim, skips_nan)
    value = jnp.take_along_axis(values, place, dim)
    index = jnp.take_along_axis(order, place, dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@lower("median.dim")
def _median_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _median(x, dim, keepdim, False)


@lower("nanmedian.dim")
def _nanmedian_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return _median(x, dim, keepdim, True)


@lower("median")
def _median_all(x: Array) -> Array:
    return _median(x.reshape(-1), 0, False, False)[0]


@lower("nanmedian")
def _nanmedian_all(x: Array) -> Array:
    return _median(x.reshape(-1), 0, False, True)[0]
