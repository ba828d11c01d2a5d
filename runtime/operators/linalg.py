"""Linear algebra: factorisations, solutions, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.operators.lowering import Cast, lower

Array = Any


def _adjoint(a: Array) -> Array:
    return jnp.conj(jnp.swapaxes(a, -1, -2))


@lower("linalg_cholesky_ex", multiplies=True)
def _cholesky(a: Array, *, upper: bool = False, check_errors: bool = False, meta: Any) -> Any:
    low = lax.linalg.cholesky(_adjoint(a) if upper else a, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(low.real), (-2, -1)).astype(jnp.int32)
    return (_adjoint(low) if upper else low), failed


@lower("linalg_solve_triangular", multiplies=True)
def _solve_triangular(
    a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, batch + a.shape[-2:])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lower("triangular_solve", multiplies=True)
def _old_triangular_solve(
    b: Array,
    a: Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> Any:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, batch + a.shape[-2:])
    b = jnp.broadcast_to(b, batch + b.shape[-2:])
    x = lax.linalg.triangular_solve(
        a,
        b,
        left_side=True,
        lower=not upper,
        transpose_a=transpose,
        unit_diagonal=unitriangular,
    )
    return x, a


@lower("linalg_inv_ex", multiplies=True)
def _inverse(a: Array, *, check_errors: bool = False) -> Any:
    inverse = jnp.linalg.inv(a)
    return inverse, jnp.any(~jnp.isfinite(inverse), (-2, -1)).astype(jnp.int32)


@lower("_linalg_eigh", multiplies=True)
def _eigh(a: Array, uplo: str = "L", compute_v: bool = True) -> Any:
    vectors, values = lax.linalg.eigh(a, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), a.dtype)


@lower("linalg_qr", multiplies=True)
def _qr(a: Array, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, mode="r")
    return tuple(jnp.linalg.qr(a, mode=mode))


@lower("_linalg_svd", multiplies=True)
def _svd(
    a: Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> Any:
    if not compute_uv:
        values = jnp.linalg.svd(a, compute_uv=False)
        return jnp.zeros((0,), a.dtype), values, jnp.zeros((0,), a.dtype)
    return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))


# --- Fourier transforms; ATen numbers the normalisations

_NONE, _ROOT, _FULL = 0, 1, 2


def _scaled(x: Array, normalization: int, count: int) -> Array:
    factor = {_NONE: 1.0, _ROOT: count**-0.5, _FULL: 1 / count}[normalization]
    return x * jnp.asarray(factor, x.real.dtype)


@lower("_fft_c2c")
def _c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    count = 1
    for d in dim:
        count *= x.shape[d]
    if forward:
        return _scaled(jnp.fft.fftn(x, axes=dim), normalization, count)
    return _scaled(jnp.fft.ifftn(x, axes=dim, norm="forward"), normalization, count)


@lower("_fft_r2c")
def _r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    count = 1
    for d in dim:
        count *= x.shape[d]
    function = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return _scaled(function(x, axes=dim), normalization, count)


@lower("_fft_c2r")
def _c2r(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    shape = [x.shape[d] for d in dim[:-1]] + [last_dim_size]
    count = 1
    for length in shape:
        count *= length
    return _scaled(jnp.fft.irfftn(x, s=shape, axes=dim, norm="forward"), normalization, count)


@lower("linalg_cross", cast=Cast.RESULT)
def _cross(a: Array, b: Array, *, dim: int = -1) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.cross(a, b, axis=dim)
