"""How a view lies in its storage: read it from, and write it to, an array, in terms of XLA.

All functions here are traced; sizes, strides and offsets are in elements and known. An offset may
be traced too (`at`): then the one given stands for all whose cuts have the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as torch counts them."""
    strides = [1] * len(size)
    for dim in range(len(size) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(size[dim + 1], 1)
    return tuple(strides)


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie in row-major order, without gaps; dims of size 1 do not matter."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def storage_extent(size: Sequence[int], stride: Sequence[int], offset: int = 0) -> int:
    """How many elements a storage must have to hold the view."""
    if 0 in size:
        return 0
    return offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def dense_order(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dims from the slowest to the fastest if elements fill their storage; else None."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim], dim))
    expected = 1
    for dim in reversed(order):
        if size[dim] != 1:
            if stride[dim] != expected:
                return None
            expected *= size[dim]
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Cut:
    """A view as a rectangular cut of the storage, seen as a row-major array.

    Attributes:
        dims: shape to see the storage in; may need more elements than it has, as padding.
        starts: of the cut.
        lengths: of the cut.
        order: the view's dims (of size > 1 and stride > 0), slowest first; one more dim of the
            cut, of length 1, is the last where the fastest stride is not 1.
    """

    dims: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    def ends_inside(self, elements: int) -> bool:
        """Whether the rows of the cut are among those that a storage has in full."""
        return (self.starts[0] + self.lengths[0]) * math.prod(self.dims[1:]) <= elements

    def moved(
        self, at: Array, elements: int, *, padded: bool
    ) -> tuple[tuple[int, ...], list[Array]]:
        """The shape to see the storage in, and the starts, where `at` is the view's offset."""
        pitches = [math.prod(self.dims[place + 1 :]) for place in range(len(self.dims))]
        rows = -(-elements // pitches[0]) if padded else elements // pitches[0]
        starts = []
        for pitch in pitches:
            starts.append(at // pitch)
            at = at % pitch
        return (rows, *self.dims[1:]), starts


def cut_of(size: Sequence[int], stride: Sequence[int], offset: int) -> Cut | None:
    """The view as a cut; None where it is none (overlapping windows, odd strides)."""
    order = [dim for dim in range(len(size)) if size[dim] != 1 and stride[dim] != 0]
    order.sort(key=lambda dim: -stride[dim])
    dims, starts, lengths = [], [], []
    left, pitch = offset, None
    for dim in order:
        if pitch is not None:
            if pitch % stride[dim]:
                return None
            dims.append(pitch // stride[dim])
        pitch = stride[dim]
        starts.append(left // pitch)
        lengths.append(size[dim])
        left %= pitch
    if pitch is None:  # one element
        return Cut((offset + 1,), (offset,), (1,), ())
    dims.insert(0, starts[0] + lengths[0])
    if pitch > 1:
        dims.append(pitch)
        starts.append(left)
        lengths.append(1)
    if any(s + n > d for s, n, d in zip(starts, lengths, dims, strict=True)):
        return None
    return Cut(tuple(dims), tuple(starts), tuple(lengths), tuple(order))


def _moved(cut: Cut, at: Array, flat: Array) -> tuple[tuple[int, ...], Any]:
    elements = flat.shape[0]
    return cut.moved(at, elements, padded=not cut.ends_inside(elements))


def _as_dims(flat: Array, dims: tuple[int, ...]) -> Array:
    from jax import numpy as jnp

    needed = math.prod(dims)
    if needed > flat.shape[0]:
        flat = jnp.pad(flat, (0, needed - flat.shape[0]))
    elif needed < flat.shape[0]:
        flat = flat[:needed]
    return flat.reshape(dims)


def _positions(size: Sequence[int], stride: Sequence[int], offset: Any) -> Any:
    """The place in the storage of every element."""
    places = np.zeros(tuple(size), np.int64)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = length
        places += (np.arange(length) * step).reshape(shape)
    return places + offset


def bitcast(flat: Array, dtype: np.dtype[Any]) -> Array:
    """The bytes of a 1-d array, read as another dtype."""
    from jax import lax
    from jax import numpy as jnp

    if flat.dtype == dtype:
        return flat
    if flat.dtype == np.bool_:
        flat = flat.astype(np.uint8)
    if flat.dtype.kind == "c":  # XLA casts no bits of complex numbers
        part = np.dtype(f"float{flat.dtype.itemsize * 4}")
        flat = jnp.stack([flat.real, flat.imag], axis=-1).reshape(-1).astype(part)
    if dtype == np.bool_:
        return bitcast(flat, np.dtype(np.uint8)) != 0
    if dtype.kind == "c":
        part = np.dtype(f"float{dtype.itemsize * 4}")
        pairs = bitcast(flat, part).reshape(-1, 2)
        return lax.complex(pairs[:, 0], pairs[:, 1])
    ratio = dtype.itemsize // flat.dtype.itemsize
    if ratio > 1:
        flat = flat[: flat.shape[0] // ratio * ratio].reshape(-1, ratio)
    return lax.bitcast_convert_type(flat, dtype).reshape(-1)


def read(
    array: Array,
    dtype: np.dtype[Any],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    at: Array = None,
) -> Array:
    """The view's elements, as an array of shape `size`."""
    from jax import lax
    from jax import numpy as jnp

    size = tuple(size)
    count = math.prod(size)
    if array is None or not count:
        return jnp.zeros(size, dtype)
    same = array.dtype == dtype
    if same and array.size == count and not offset and is_contiguous(size, stride):
        return array if array.shape == size else array.reshape(size)
    flat = bitcast(array.reshape(-1), dtype)
    cut = cut_of(size, stride, offset)
    if cut is None:
        return flat[_positions(size, stride, offset if at is None else at)]
    if at is None:
        part = _as_dims(flat, cut.dims)
        limits = [s + n for s, n in zip(cut.starts, cut.lengths, strict=True)]
        part = part[tuple(slice(s, e) for s, e in zip(cut.starts, limits, strict=True))]
    else:
        dims, starts = _moved(cut, at, flat)
        part = lax.dynamic_slice(_as_dims(flat, dims), starts, cut.lengths)
    kept = [size[dim] for dim in cut.order]
    part = part.reshape(kept)
    back = sorted(range(len(kept)), key=lambda place: cut.order[place])
    part = part.transpose(back)
    full = [size[dim] if dim in cut.order else 1 for dim in range(len(size))]
    return jnp.broadcast_to(part.reshape(full), size)


def write(
    array: Array,
    new: Array,
    dtype: np.dtype[Any],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    at: Array = None,
) -> Array:
    """The storage's array with the view's elements replaced by `new`, of shape `size`.

    Elements of the view must not share memory.
    """
    from jax import lax

    size = tuple(size)
    if not math.prod(size):
        return array
    flat = bitcast(array.reshape(-1), dtype)
    cut = cut_of(size, stride, offset)
    if cut is None:
        flat = flat.at[_positions(size, stride, offset if at is None else at)].set(new)
    else:
        count = flat.shape[0]
        dims, starts = (cut.dims, cut.starts) if at is None else _moved(cut, at, flat)
        covered = math.prod(dims)
        whole = _as_dims(flat, dims)
        ranked = sorted(cut.order)
        part = new.reshape([size[dim] for dim in ranked])
        part = part.transpose([ranked.index(dim) for dim in cut.order]).reshape(cut.lengths)
        whole = lax.dynamic_update_slice(whole, part, starts).reshape(-1)
        if covered < count:
            whole = lax.dynamic_update_slice(flat, whole, (0,))
        flat = whole[:count]
    return bitcast(flat, array.dtype).reshape(array.shape)


def in_storage_order(value: Array, size: Sequence[int], stride: Sequence[int]) -> Array:
    """The elements of `value`, of shape `size`, in the order in which `stride` lays them down."""
    if is_contiguous(size, stride):
        return value
    order = dense_order(size, stride)
    if order is not None:
        return value.transpose(order)
    from jax import numpy as jnp

    extent = storage_extent(size, stride)
    return write(jnp.zeros(extent, value.dtype), value, value.dtype, size, stride, 0)
