"""Operators that move elements: concatenation, flips, pads, and the gradients of views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.device.geometry import read, storage_extent, write
from tpu_dist.runtime.operators.lowering import Cast, lower

Array = Any


@lower("cat", cast=Cast.RESULT)
def _cat(tensors: list[Array], dim: int = 0) -> Array:
    kept = [t for t in tensors if t.shape != (0,)] or tensors[:1]
    return jnp.concatenate(kept, axis=dim)


@lower("stack", cast=Cast.RESULT)
def _stack(tensors: list[Array], dim: int = 0) -> Array:
    return jnp.stack(tensors, axis=dim)


@lower("flip")
def _flip(x: Array, dims: Sequence[int]) -> Array:
    return jnp.flip(x, tuple(dims)) if x.ndim and dims else x


@lower("roll")
def _roll(x: Array, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Array:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims))


@lower("tril")
def _tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


@lower("triu")
def _triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


@lower("constant_pad_nd")
def _constant_pad(x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    widths = [(0, 0, 0)] * x.ndim
    for place in range(len(pad) // 2):
        widths[x.ndim - 1 - place] = (pad[2 * place], pad[2 * place + 1], 0)
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


@lower("repeat")
def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


# --- a view's elements replaced, and a view's gradient: zeros, but for the view


def _slices(
    shape: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> tuple[slice, ...]:
    dim %= len(shape)
    first, last, _ = slice(start, end).indices(shape[dim])
    return (slice(None),) * dim + (slice(first, max(first, last), step),)


@lower("slice_scatter")
def _slice_scatter(
    x: Array,
    src: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    return x.at[_slices(x.shape, dim, start, end, step)].set(src.astype(x.dtype))


@lower("slice_backward")
def _slice_backward(
    grad: Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Array:
    zeros = jnp.zeros(tuple(sizes), grad.dtype)
    return zeros.at[_slices(sizes, dim, start, end, step)].set(grad)


@lower("select_scatter")
def _select_scatter(x: Array, src: Array, dim: int, index: int) -> Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(src.astype(x.dtype))


@lower("select_backward")
def _select_backward(grad: Array, sizes: Sequence[int], dim: int, index: int) -> Array:
    zeros = jnp.zeros(tuple(sizes), grad.dtype)
    return zeros.at[(slice(None),) * (dim % len(sizes)) + (index,)].set(grad)


def _on_diagonal(x: Array, src: Array, offset: int, dim1: int, dim2: int) -> Array:
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    places = np.arange(src.shape[-1])
    rows, columns = places + max(-offset, 0), places + max(offset, 0)
    moved = moved.at[..., rows, columns].set(src.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@lower("diagonal_scatter")
def _diagonal_scatter(x: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return _on_diagonal(x, src, offset, dim1, dim2)


@lower("diagonal_backward")
def _diagonal_backward(
    grad: Array, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Array:
    return _on_diagonal(jnp.zeros(tuple(sizes), grad.dtype), grad, offset, dim1, dim2)


@lower("as_strided_scatter")
def _as_strided_scatter(
    x: Array,
    src: Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Array:
    return write(x, src.astype(x.dtype), x.dtype, size, stride, storage_offset or 0)


@lower("unfold_backward")
def _unfold_backward(grad: Array, sizes: Sequence[int], dim: int, size: int, step: int) -> Array:
    if not sizes:
        return grad.reshape(())
    dim %= len(sizes)
    places = np.arange(grad.shape[dim])[:, None] * step + np.arange(size)[None, :]
    moved = jnp.moveaxis(grad, (dim, grad.ndim - 1), (0, 1))
    rest = [length for d, length in enumerate(sizes) if d != dim]
    zeros = jnp.zeros((sizes[dim], *rest), grad.dtype)
    return jnp.moveaxis(zeros.at[places].add(moved), 0, dim)


@lower("as_strided_copy")
def _as_strided_copy(
    x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    extent = storage_extent(size, stride, storage_offset or 0)
    assert extent <= x.size
    return read(x, x.dtype, size, stride, storage_offset or 0)
