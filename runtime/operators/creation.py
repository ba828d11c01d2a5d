"""Operators that make tensors from no tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jax import numpy as jnp

from tpu_dist.runtime.device.dtypes import array_dtype
from tpu_dist.runtime.device.tensors import new_empty
from tpu_dist.runtime.operators.lowering import lower

Array = Any
Tensor = torch.Tensor


def check_device(device: torch.device | None) -> None:
    """Refuse a device of "tpu" that this process has not.

    Raises:
        RuntimeError: the index is another than 0.
    """
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(
            f"device {device} was asked for, and this process has one TPU device, tpu:0. Each "
            f"process drives one device: start more of them with tpu-launch."
        )


def empty_memory_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """A tensor that nothing was written to yet; zeros, if it is read."""
    check_device(device)
    _check_layout(layout)
    dtype = dtype or torch.get_default_dtype()
    if memory_format in (None, torch.contiguous_format):
        return new_empty(tuple(size), dtype)
    stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return new_empty(tuple(size), dtype, stride)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """The same, laid down as `stride` says."""
    check_device(device)
    _check_layout(layout)
    return new_empty(tuple(size), dtype or torch.get_default_dtype(), tuple(stride))


def _check_layout(layout: torch.layout | None) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(
            f"tensors of layout {layout} cannot be on 'tpu'; dense ones can. Keep it on the CPU."
        )


@lower("fill.Scalar", "fill.Tensor")
def _fill(self: Array, value: Array, meta: Any) -> Array:
    if value.dtype.kind == "c" and array_dtype(meta.dtype).kind != "c":
        value = value.real
    return jnp.broadcast_to(value.astype(array_dtype(meta.dtype)), self.shape)


@lower("zero")
def _zero(self: Array) -> Array:
    return jnp.zeros(self.shape, self.dtype)


# These take no tensor, so torch cannot see by them which device is meant: their out= variants are
# what it calls.


def _is_integer(number: Array) -> bool:
    return isinstance(number, int) or (hasattr(number, "dtype") and number.dtype.kind in "iu")


# Its shape depends on its numbers, so they tell programs apart.
@lower("arange.start_step", static=("start", "end", "step"))
def _arange(start: Array, end: Array, step: Array, meta: Any) -> Array:
    dtype = array_dtype(meta.dtype)
    wide = jnp.int64 if dtype.kind in "iu" and _is_integer(start) else jnp.float64
    steps = jnp.arange(meta.shape[0], dtype=jnp.int64)
    start, step = jnp.asarray(start), jnp.asarray(step)
    return (start.astype(wide) + steps.astype(wide) * step.astype(wide)).astype(dtype)


@lower("linspace")
def _linspace(start: Array, end: Array, steps: int, meta: Any) -> Array:
    dtype = array_dtype(meta.dtype)
    wide = jnp.complex128 if dtype.kind == "c" else jnp.float64
    if dtype.kind not in "iubc" and dtype.itemsize <= 4:
        wide = jnp.float32
    first, last = start.astype(wide), end.astype(wide)
    if steps == 1:
        return first.reshape(1)
    step = (last - first) / (steps - 1)
    places = jnp.arange(steps)
    forwards = first + step * places.astype(wide)
    backwards = last - step * (steps - 1 - places).astype(wide)
    result = jnp.where(places < steps // 2, forwards, backwards)
    return result.astype(dtype)


@lower("logspace")
def _logspace(start: Array, end: Array, steps: int, base: float = 10.0, *, meta: Any) -> Array:
    dtype = array_dtype(meta.dtype)
    wide = jnp.complex128 if dtype.kind == "c" else jnp.float64
    exponents = jnp.linspace(start.astype(wide), end.astype(wide), steps)
    return jnp.power(jnp.asarray(base, wide), exponents)


@lower("eye.m")
def _eye(n: int, m: int, meta: Any) -> Array:
    return jnp.eye(n, m, dtype=array_dtype(meta.dtype))


@lower("eye")
def _eye_square(n: int, meta: Any) -> Array:
    return jnp.eye(n, dtype=array_dtype(meta.dtype))


KERNELS: Mapping[str, Callable[..., Any]] = {
    "empty.memory_format": empty_memory_format,
    "empty_strided": empty_strided,
}
