"""Reading and writing by indices that are tensors.

An index out of range is found inside the program and raised by whoever dispatched it: see
runtime/device/checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jax import numpy as jnp

from tpu_dist.runtime.device.tensors import is_on_device
from tpu_dist.runtime.device.transfer import to_host
from tpu_dist.runtime.operators.fallback import fall_back
from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import LOWERINGS, lower
from tpu_dist.runtime.operators.operator import Operator
from tpu_dist.runtime.operators.programs import (
    NotLowered,
    compile_program,
    is_tracing,
    program_cache,
)
from tpu_dist.runtime.operators.reading import read_view
from tpu_dist.runtime.operators.writing_kernels import writing_kernel

Array = Any
Tensor = torch.Tensor
_aten = torch.ops.aten


def _outside(index: Array, length: int, *, negative: bool = True) -> Array:
    """Whether an index is out of range."""
    low = -length if negative else 0
    return jnp.any((index < low) | (index >= length))


def _wrapped(index: Array, length: int) -> Array:
    return jnp.where(index < 0, index + length, index)


# --- the errors, as torch raises them on the CPU


def _first_outside(index: Tensor, length: int, *, negative: bool) -> int:
    values = to_host(index).reshape(-1)
    wrong = (values < (-length if negative else 0)) | (values >= length)
    return int(values[wrong][0]) if wrong.any() else -1


def _index_error(self: Tensor, indices: Sequence[Tensor | None], *rest: Any, **named: Any) -> Any:
    for dim, index in enumerate(indices):
        if index is not None and index.dtype not in (torch.bool, torch.uint8):
            length = self.shape[dim]
            values = to_host(index)
            if bool(((values < -length) | (values >= length)).any()):
                wrong = _first_outside(index, length, negative=True)
                return IndexError(
                    f"index {wrong} is out of bounds for dimension {dim} with size {length}"
                )
    return IndexError("index out of range in self")


def _range_error(*args: Any, **kwargs: Any) -> Exception:
    return IndexError("index out of range in self")


def _bounds_error(self: Tensor, dim: int, index: Tensor, *rest: Any, **named: Any) -> Exception:
    length = self.shape[dim] if self.dim() else 1
    wrong = _first_outside(index, length, negative=False)
    return RuntimeError(f"index {wrong} is out of bounds for dimension {dim} with size {length}")


# --- x[i, j]


def _subscripts(x: Array, indices: Sequence[Array | None]) -> tuple[tuple[Any, ...], Array]:
    flag = jnp.zeros((), bool)
    parts: list[Any] = []
    for dim, index in enumerate(indices):
        if index is None:
            parts.append(slice(None))
            continue
        if index.dtype.kind == "b":
            raise NotLowered("a mask as an index has no shape of its own")
        if index.size:
            flag = flag | _outside(index, x.shape[dim])
        parts.append(_wrapped(index, x.shape[dim]))
    return tuple(parts), flag


@lower("index.Tensor", checks=_index_error)
def _index(x: Array, indices: list[Array | None]) -> tuple[Array, Array]:
    parts, flag = _subscripts(x, indices)
    return x.at[parts].get(mode="clip"), flag


@lower("_unsafe_index.Tensor")
def _unsafe_index(x: Array, indices: list[Array | None]) -> Array:
    return _index(x, indices)[0]


@lower("index_put", "_unsafe_index_put", checks=_index_error)
def _index_put(
    x: Array,
    indices: list[Array | None],
    values: Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> tuple[Array, Array]:
    parts, flag = _subscripts(x, indices)
    place = x.at[parts]
    if accumulate and x.dtype.kind == "b":
        return place.max(values, mode="drop"), flag
    return (place.add if accumulate else place.set)(values, mode="drop"), flag


_get = functional_kernel(Operator(_aten.index.Tensor, LOWERINGS["index.Tensor"]))
_put_lowering = LOWERINGS["index_put"]
_put = functional_kernel(Operator(_aten.index_put.default, _put_lowering))
_put_in_place = writing_kernel(
    Operator(_aten.index_put_.default, _put_lowering, _aten.index_put.default)
)


def _resolved(self: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices on the device, with masks turned into what they select."""
    resolved: list[Tensor | None] = []
    for index in indices:
        if index is None:
            resolved.append(None)
            continue
        if not is_on_device(index):
            index = index.to(self.device)
        if index.dtype in (torch.bool, torch.uint8):
            dims = len(resolved)
            shape = self.shape[dims : dims + index.dim()]
            if tuple(index.shape) != tuple(shape):
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index 0 does not match the "
                    f"shape of the indexed tensor {list(self.shape)} at index {dims}"
                )
            resolved.extend(nonzero(index).unbind(1))
        else:
            resolved.append(index)
    return resolved


def index(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """x[i, j, ...]; masks are counted first, which waits for them."""
    return _get(self, _resolved(self, indices))  # type: ignore[no-any-return]


def index_put_(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """x[i, j, ...] = values; a number put under one mask needs no count."""
    if not is_on_device(values):
        values = values.to(self.device)
    masks = [i for i in indices if i is not None]
    if len(masks) == 1 and masks[0].dtype is torch.bool and not accumulate:
        mask = masks[0].to(self.device)
        before = list(indices).index(masks[0])
        if values.dim() == 0 and tuple(mask.shape) == tuple(
            self.shape[before : before + mask.dim()]
        ):
            after = self.dim() - before - mask.dim()
            mask = mask.reshape((1,) * before + tuple(mask.shape) + (1,) * after)
            return self.masked_fill_(mask, values)
    _put_in_place(self, _resolved(self, indices), values, accumulate)
    return self


def index_put(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """index_put_() on a copy."""
    return index_put_(self.clone(), indices, values, accumulate)


def _index_put_impl(
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    return index_put_(self, indices, values, accumulate)


# --- results whose shape depends on values: counted first, then made

_programs = program_cache()


def _compiled(key: Any, function: Callable[..., Any], *operands: Array) -> Any:
    full = (key, *((o.shape, o.dtype) for o in operands))
    program = _programs.get(full)
    if program is None:
        program = _programs[full] = compile_program(function, operands)
    return program(*operands)


def nonzero(self: Tensor) -> Tensor:
    """Where elements are not zero, a row for each; waits for their count."""
    from tpu_dist.runtime.device.tensors import wrap_plain

    if is_tracing():
        raise NotLowered("the shape of nonzero's result depends on values")
    array = read_view(self)
    (count,) = _compiled("count", lambda x: (jnp.count_nonzero(x),), array)
    size = int(count)

    def find(x: Array) -> tuple[Array, ...]:
        if not x.ndim:
            return (jnp.zeros((size, 0), jnp.int64),)
        found = jnp.nonzero(x, size=size, fill_value=0)
        return (jnp.stack(found, axis=1).astype(jnp.int64),)

    return wrap_plain(_compiled(("find", size), find, array)[0])


def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    """The elements under a mask; waits for their count."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    whole, under = torch.broadcast_tensors(self, mask)
    return index(whole.reshape(-1), [under.reshape(-1)])


# --- along one dim


def _grid(index: Array, dim: int) -> tuple[Array, ...]:
    """Subscripts of which that of `dim` is `index`, and the others are where they are."""
    from jax import lax

    return tuple(
        index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d)
        for d in range(index.ndim)
    )


def _lifted(*arrays: Array) -> list[Array]:
    return [a if a.ndim else a.reshape(1) for a in arrays]


@lower("gather", checks=_bounds_error)
def _gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> tuple[Array, Array]:
    shape = index.shape
    x, index = _lifted(x, index)
    dim %= x.ndim
    if not index.size:
        return jnp.zeros(shape, x.dtype), jnp.zeros((), bool)
    flag = _outside(index, x.shape[dim], negative=False)
    return x.at[_grid(index, dim)].get(mode="clip").reshape(shape), flag


_UPDATES: Mapping[str, str] = {
    "set": "set",
    "add": "add",
    "sum": "add",
    "multiply": "multiply",
    "prod": "multiply",
    "amax": "max",
    "amin": "min",
}


def _scatter_with(
    x: Array, dim: int, index: Array, src: Array, how: str, include: bool = True
) -> tuple[Array, Array]:
    shape = x.shape
    x, index = _lifted(x, index)
    dim %= x.ndim
    if not index.size:
        return x.reshape(shape), jnp.zeros((), bool)
    flag = _outside(index, x.shape[dim], negative=False)
    if src.ndim == 0:
        src = jnp.broadcast_to(src, index.shape)
    src = src[tuple(slice(0, n) for n in index.shape)].astype(x.dtype)
    grid = _grid(index, dim)
    base = x
    if not include:
        neutral = {"sum": 0, "add": 0, "prod": 1, "multiply": 1, "mean": 0}.get(how)
        if neutral is None:
            low, high = _limits(x.dtype)
            neutral = low if how == "amax" else high
        base = x.at[grid].set(jnp.asarray(neutral, x.dtype), mode="drop")
    if how == "mean":
        total = base.at[grid].add(src, mode="drop")
        counts = jnp.full(x.shape, 1 if include else 0, jnp.int64).at[grid].add(1, mode="drop")
        counts = jnp.maximum(counts, 1)
        mean = total / counts if x.dtype.kind not in "iub" else total // counts
        return mean.astype(x.dtype).reshape(shape), flag
    update = getattr(base.at[grid], _UPDATES[how])
    return update(src, mode="drop").reshape(shape), flag


def _limits(dtype: Any) -> tuple[Any, Any]:
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min, info.max
    return -jnp.inf, jnp.inf


@lower("scatter.src", "scatter.value", checks=_bounds_error)
def _scatter(x: Array, dim: int, index: Array, src: Array) -> tuple[Array, Array]:
    return _scatter_with(x, dim, index, src, "set")


@lower("scatter.reduce", "scatter.value_reduce", checks=_bounds_error)
def _scatter_reduce(
    x: Array, dim: int, index: Array, src: Array, *, reduce: str
) -> tuple[Array, Array]:
    return _scatter_with(x, dim, index, src, reduce)


@lower("scatter_add", checks=_bounds_error)
def _scatter_add(x: Array, dim: int, index: Array, src: Array) -> tuple[Array, Array]:
    return _scatter_with(x, dim, index, src, "add")


@lower("scatter_reduce.two", checks=_bounds_error)
def _scatter_reduce_two(
    x: Array, dim: int, index: Array, src: Array, reduce: str, *, include_self: bool = True
) -> tuple[Array, Array]:
    return _scatter_with(x, dim, index, src, reduce, include_self)


def _at_rows(x: Array, dim: int, index: Array) -> tuple[Any, Array]:
    """The part of `x` at `index` along `dim`, to be updated; and whether that is out of range."""
    rows = index.reshape(-1)
    flag = _outside(rows, x.shape[dim]) if rows.size else jnp.zeros((), bool)
    return x.at[(slice(None),) * dim + (_wrapped(rows, x.shape[dim]),)], flag


@lower("index_select", checks=_range_error)
def _index_select(x: Array, dim: int, index: Array) -> tuple[Array, Array]:
    shape = x.shape
    (x,) = _lifted(x)
    place, flag = _at_rows(x, dim % x.ndim, index)
    result = place.get(mode="clip")
    return (result if shape else result.reshape(shape)), flag


def _index_update(how: str) -> Callable[..., Any]:
    def run(x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Any:
        shape = x.shape
        x, source = _lifted(x, source)
        place, flag = _at_rows(x, dim % x.ndim, index)
        source = source.astype(x.dtype)
        if not (isinstance(alpha, int) and alpha == 1):
            source = source * jnp.asarray(alpha).astype(x.dtype)
        return getattr(place, how)(source, mode="drop").reshape(shape), flag

    return run


lower("index_add", checks=_range_error)(_index_update("add"))
lower("index_copy", checks=_range_error)(_index_update("set"))


@lower("index_fill.int_Scalar", "index_fill.int_Tensor", checks=_range_error)
def _index_fill(x: Array, dim: int, index: Array, value: Array) -> tuple[Array, Array]:
    shape = x.shape
    (x,) = _lifted(x)
    place, flag = _at_rows(x, dim % x.ndim, index)
    return place.set(value.astype(x.dtype), mode="drop").reshape(shape), flag


@lower("take", checks=_range_error)
def _take(x: Array, index: Array) -> tuple[Array, Array]:
    flag = _outside(index, x.size) if index.size else jnp.zeros((), bool)
    return x.reshape(-1).at[_wrapped(index, x.size)].get(mode="clip"), flag


@lower("put", checks=_range_error)
def _put_flat(
    x: Array, index: Array, source: Array, accumulate: bool = False
) -> tuple[Array, Array]:
    flag = _outside(index, x.size) if index.size else jnp.zeros((), bool)
    place = x.reshape(-1).at[_wrapped(index, x.size).reshape(-1)]
    update = place.add if accumulate else place.set
    return update(source.reshape(-1), mode="drop").reshape(x.shape), flag


# --- embeddings


@lower("embedding", checks=_range_error)
def _embedding(weight: Array, indices: Array) -> tuple[Array, Array]:
    flag = (
        _outside(indices, weight.shape[0], negative=False) if indices.size else jnp.zeros((), bool)
    )
    return weight.at[indices].get(mode="clip"), flag


@lower("embedding_dense_backward")
def _embedding_backward(
    grad: Array, indices: Array, num_weights: int, padding_idx: int, scale_by_freq: bool
) -> Array:
    rows = indices.reshape(-1)
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32)).reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        wide = jnp.where((rows == padding_idx)[:, None], 0, wide)
    if scale_by_freq:
        counts = jnp.zeros(num_weights, wide.dtype).at[rows].add(1)
        wide = wide / counts[rows][:, None]
    zeros = jnp.zeros((num_weights, grad.shape[-1]), wide.dtype)
    return zeros.at[rows].add(wide, mode="drop")


@lower("histc", static=("min", "max"))
def _histc(x: Array, bins: int = 100, low: Any = 0, high: Any = 0) -> Array:
    flat = x.reshape(-1)
    wide = flat.astype(jnp.promote_types(flat.dtype, jnp.float32))
    if low == high:
        first, last = jnp.min(wide), jnp.max(wide)
        same = first == last
        first, last = jnp.where(same, first - 1, first), jnp.where(same, last + 1, last)
    else:
        first, last = jnp.asarray(low, wide.dtype), jnp.asarray(high, wide.dtype)
    place = jnp.floor((wide - first) * bins / (last - first)).astype(jnp.int32)
    place = jnp.where(wide == last, bins - 1, place)
    inside = (wide >= first) & (wide <= last)
    place = jnp.where(inside, jnp.clip(place, 0, bins - 1), bins)
    return jnp.zeros(bins, wide.dtype).at[place].add(1, mode="drop")


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number is there; waits for the largest, which says how long the result is."""
    integral = not (self.is_floating_point() or self.is_complex() or self.dtype is torch.bool)
    low, high = (int(x) for x in self.aminmax()) if integral and self.numel() else (0, -1)
    weighted = weights is not None and (weights.dim() != 1 or weights.shape != self.shape)
    if not integral or self.dim() != 1 or low < 0 or minlength < 0 or weighted:
        raised: Tensor = fall_back(_aten.bincount.default, self, weights, minlength)
        return raised
    if weights is None:
        values = torch.ones_like(self, dtype=torch.int64)
    else:
        values = weights if weights.dtype is torch.float32 else weights.double()
    counts = torch.zeros(max(high + 1, minlength), dtype=values.dtype, device=self.device)
    return counts.index_add_(0, self.long(), values) if self.numel() else counts


KERNELS: Mapping[str, Callable[..., Any]] = {
    "index.Tensor": index,
    "bincount": bincount,
    "index_put": index_put,
    "index_put_": index_put_,
    "_index_put_impl_": _index_put_impl,
    "nonzero": nonzero,
    "masked_select": masked_select,
}
