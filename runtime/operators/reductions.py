"""Reductions, and what runs along a dim: cumulative sums, softmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.device.dtypes import TO_ARRAY
from tpu_dist.runtime.operators.lowering import Cast, lower, lower_all
from tpu_dist.runtime.operators.programs import NotLowered

Array = Any
Dims = Sequence[int] | int | None


def dims_of(x: Array, dim: Dims) -> tuple[int, ...]:
    """The dims that are meant: all, if none is named."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    named = (dim,) if isinstance(dim, int) else dim
    return tuple(d % max(x.ndim, 1) for d in named) if x.ndim else ()


def _one(x: Array, dim: int) -> int:
    return dim % int(max(x.ndim, 1))


def _sum(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    if x.dtype.kind == "b":
        x = x.astype(jnp.int64)
    return jnp.sum(x, dims_of(x, dim), keepdims=keepdim)


def _mean(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.mean(x, dims_of(x, dim), keepdims=keepdim)


def _nansum(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return _sum(x if x.dtype.kind in "iub" else jnp.where(jnp.isnan(x), 0, x), dim, keepdim)


def _prod(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return jnp.prod(x, dims_of(x, dim), keepdims=keepdim)


def _logsumexp(x: Array, dim: Dims, keepdim: bool = False) -> Array:
    if x.dtype.kind == "c":
        return jnp.log(jnp.sum(jnp.exp(x), dims_of(x, dim), keepdims=keepdim))
    return jax.nn.logsumexp(x, dims_of(x, dim), keepdims=keepdim)


lower_all(
    {
        "sum": _sum,
        "sum.dim_IntList": _sum,
        "mean": _mean,
        "mean.dim": _mean,
        "nansum": _nansum,
        "prod": lambda x: _prod(x),
        "prod.dim_int": _prod,
        "logsumexp": _logsumexp,
    },
    cast=Cast.RESULT,
)


def _amax(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.max(x, dims_of(x, dim), keepdims=keepdim)


def _amin(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.min(x, dims_of(x, dim), keepdims=keepdim)


lower_all(
    {
        "amax": _amax,
        "amin": _amin,
        "max": lambda x: _amax(x),
        "min": lambda x: _amin(x),
        "aminmax": lambda x, dim=None, keepdim=False: (
            _amin(x, dim, keepdim),
            _amax(x, dim, keepdim),
        ),
        "all": lambda x: jnp.all(x != 0),
        "any": lambda x: jnp.any(x != 0),
        "all.dim": lambda x, dim, keepdim=False: jnp.all(x != 0, dims_of(x, dim), keepdims=keepdim),
        "any.dim": lambda x, dim, keepdim=False: jnp.any(x != 0, dims_of(x, dim), keepdims=keepdim),
        "all.dims": lambda x, dim=None, keepdim=False: jnp.all(
            x != 0, _some(x, dim), keepdims=keepdim
        ),
        "any.dims": lambda x, dim=None, keepdim=False: jnp.any(
            x != 0, _some(x, dim), keepdims=keepdim
        ),
        "count_nonzero.dim_IntList": lambda x, dim: jnp.sum(x != 0, dims_of(x, dim)),
    }
)


def _some(x: Array, dim: Dims) -> tuple[int, ...]:
    """dims_of(), but an empty list names none."""
    return () if dim is not None and not isinstance(dim, int) and not dim else dims_of(x, dim)


def _first_of(x: Array, best: Array, dim: int) -> Array:
    """The first place along `dim` where x is the best, or NaN."""
    hit = x == best
    if x.dtype.kind not in "iubc":
        hit = jnp.where(jnp.isnan(best), jnp.isnan(x), hit)
    return jnp.argmax(hit, axis=dim, keepdims=True).astype(jnp.int64)


def _arg(reduce: Callable[..., Array]) -> Callable[..., Array]:
    def run(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
        shape = (1,) * x.ndim
        if dim is None:
            flat = x.reshape(-1)
            place = _first_of(flat, reduce(flat, 0, keepdims=True), 0)
            return place.reshape(shape if keepdim else ())
        if not x.ndim:
            return jnp.zeros((), jnp.int64)
        place = _first_of(x, reduce(x, dim, keepdims=True), dim)
        return place if keepdim else place.squeeze(dim)

    return run


def _best(reduce: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    def run(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int64)
        best = reduce(x, dim, keepdims=True)
        place = _first_of(x, best, dim)
        return (best, place) if keepdim else (best.squeeze(dim), place.squeeze(dim))

    return run


lower_all(
    {
        "argmax": _arg(jnp.max),
        "argmin": _arg(jnp.min),
        "max.dim": _best(jnp.max),
        "min.dim": _best(jnp.min),
    }
)


# --- moments and norms


def _var(
    x: Array,
    dim: Dims = None,
    *,
    correction: Any = 1,
    keepdim: bool = False,
) -> tuple[Array, Array]:
    """Variance and mean; correction is what is taken off the count."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = dims_of(x, dim)
    count = float(np.prod([x.shape[d] for d in dims]))
    mean = jnp.mean(x, dims, keepdims=True)
    deviation = x - mean
    square = (deviation * jnp.conj(deviation)).real
    correction = 1 if correction is None else correction
    left = jnp.maximum(0.0, jnp.asarray(count - correction, square.dtype))
    variance = jnp.sum(square, dims, keepdims=keepdim) / left
    return variance, mean if keepdim else mean.squeeze(dims)


lower_all(
    {
        "var.correction": lambda x, dim=None, *, correction=1, keepdim=False: _var(
            x, dim, correction=correction, keepdim=keepdim
        )[0],
        "std.correction": lambda x, dim=None, *, correction=1, keepdim=False: jnp.sqrt(
            _var(x, dim, correction=correction, keepdim=keepdim)[0]
        ),
        "var_mean.correction": _var,
        "std_mean.correction": lambda x, dim=None, *, correction=1, keepdim=False: (
            lambda pair: (jnp.sqrt(pair[0]), pair[1])
        )(_var(x, dim, correction=correction, keepdim=keepdim)),
    },
    static=("correction",),
)


def _norm(x: Array, order: float, dims: tuple[int, ...], keepdim: bool) -> Array:
    size = jnp.abs(x)
    if order == 2:
        return jnp.sqrt(jnp.sum(size * size, dims, keepdims=keepdim))
    if order == float("inf"):
        return jnp.max(size, dims, keepdims=keepdim)
    if order == float("-inf"):
        return jnp.min(size, dims, keepdims=keepdim)
    if order == 0:
        return jnp.sum((size != 0).astype(size.dtype), dims, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, dims, keepdims=keepdim)
    return jnp.power(jnp.sum(jnp.power(size, order), dims, keepdims=keepdim), 1 / order)


@lower("linalg_vector_norm", static=("ord",))
def _vector_norm(
    x: Array, order: float = 2, dim: Dims = None, keepdim: bool = False, *, meta: Any
) -> Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    wide = jnp.promote_types(wide, TO_ARRAY[meta.dtype])
    return _norm(x.astype(wide), order, dims_of(x, dim), keepdim)


def foreach_norm(x: Array, order: float, dtype: torch.dtype) -> Array:
    """The norm of all elements, kept in at least float32 on the way."""
    return _norm(x.astype(jnp.promote_types(x.dtype, jnp.float32)), order, dims_of(x, None), False)


# --- along a dim


def _along(function: Callable[[Array, int], Array]) -> Callable[..., Array]:
    def run(x: Array, dim: int) -> Array:
        return function(x, _one(x, dim)) if x.ndim else function(x.reshape(1), 0).reshape(())

    return run


def _log_cumulative(x: Array, dim: int) -> Array:
    if x.dtype.kind == "c":
        raise NotLowered("XLA's logarithm takes another branch than the CPU's running sum")
    # Its gradient takes differences of what is nearly equal: wide, as the CPU does it.
    wide = jnp.promote_types(x.dtype, jnp.float64)
    return lax.cumlogsumexp(x.astype(wide), axis=dim).astype(x.dtype)


lower_all(
    {
        "cumsum": _along(lambda x, dim: jnp.cumsum(x, dim)),
        "cumprod": _along(lambda x, dim: jnp.cumprod(x, dim)),
        "logcumsumexp": _along(_log_cumulative),
    },
    cast=Cast.RESULT,
)


def _cumulative_best(is_better: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    def run(x: Array, dim: int) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int64)
        dim = _one(x, dim)
        places = lax.broadcasted_iota(jnp.int64, x.shape, dim)

        def later(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
            takes = is_better(b[0], a[0])
            if x.dtype.kind not in "iubc":
                takes = (takes | jnp.isnan(b[0])) & ~(jnp.isnan(a[0]) & ~jnp.isnan(b[0]))
            return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

        best, place = lax.associative_scan(later, (x, places), axis=dim)
        return best, place

    return run


lower_all(
    {
        "cummax": _cumulative_best(lambda new, old: new >= old),
        "cummin": _cumulative_best(lambda new, old: new <= old),
    }
)


def _softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.softmax(x, _one(x, dim)) if x.ndim else jnp.ones_like(x)


def _log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    return jax.nn.log_softmax(x, _one(x, dim)) if x.ndim else jnp.zeros_like(x)


def _softmax_backward(grad: Array, y: Array, dim: int, dtype: torch.dtype) -> Array:
    dims = _one(y, dim) if y.ndim else None
    product = grad * y
    return product - y * jnp.sum(product, dims, keepdims=True)


def _log_softmax_backward(grad: Array, y: Array, dim: int, dtype: torch.dtype) -> Array:
    dims = _one(y, dim) if y.ndim else None
    return grad - jnp.exp(y) * jnp.sum(grad, dims, keepdims=True)


lower_all(
    {
        "_softmax": _softmax,
        "_log_softmax": _log_softmax,
        "_softmax_backward_data": _softmax_backward,
        "_log_softmax_backward_data": _log_softmax_backward,
    },
    cast=Cast.RESULT,
)
