"""Pooling of one, two and three dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from tpu_dist.runtime.operators.lowering import lower

Array = Any
Window = tuple[int, int, int, int]  # kernel, stride, padding, dilation


def _full(values: Sequence[int] | int, dims: int) -> tuple[int, ...]:
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * dims if len(values) == 1 else values


def _places(length: int, outputs: int, window: Window) -> tuple[Any, Any]:
    """For each output, the places that its window covers, and which of them are inside."""
    kernel, stride, padding, dilation = window
    starts = np.arange(outputs) * stride - padding
    places = starts[:, None] + np.arange(kernel) * dilation
    return np.clip(places, 0, length - 1), (places >= 0) & (places < length)


def _windows(
    x: Array, outputs: Sequence[int], windows: Sequence[Window], outside: Any
) -> tuple[Array, Any]:
    """The elements of each window in the last dim, and their places in the flattened input."""
    dims = len(windows)
    spatial = x.shape[-dims:]
    flat, inside = np.zeros((1,) * (2 * dims), np.int64), np.ones((1,) * (2 * dims), bool)
    for d in range(dims):
        places, valid = _places(spatial[d], outputs[d], windows[d])
        shape = [1] * (2 * dims)
        shape[d], shape[dims + d] = places.shape
        flat = flat * spatial[d] + places.reshape(shape)
        inside = inside & valid.reshape(shape)
    flat = np.broadcast_to(flat, np.broadcast_shapes(flat.shape, inside.shape))
    sizes = tuple(window[0] for window in windows)
    flat = flat.reshape(*outputs, math.prod(sizes))
    inside = np.broadcast_to(inside, (*outputs, *sizes)).reshape(flat.shape)
    values = x.reshape(*x.shape[:-dims], math.prod(x.shape[-dims:]))[..., flat]
    return jnp.where(inside, values, outside), flat


def _max_pool(dims: int) -> Callable[..., tuple[Array, Array]]:
    def run(
        x: Array,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
        *,
        meta: Any,
    ) -> tuple[Array, Array]:
        kernel = _full(kernel, dims)
        windows = list(
            zip(
                kernel,
                _full(stride, dims) if stride else kernel,
                _full(padding, dims),
                _full(dilation, dims),
                strict=True,
            )
        )
        low = -jnp.inf if x.dtype.kind not in "iub" else jnp.iinfo(x.dtype).min
        outputs = tuple(meta[0].shape[-dims:])
        values, flat = _windows(x, outputs, windows, low)
        # NaN is the largest, and the last of several.
        best = jnp.argmax(values, -1)
        picked = jnp.take_along_axis(values, best[..., None], -1)[..., 0]
        places = jnp.broadcast_to(jnp.asarray(flat), values.shape)
        return picked, jnp.take_along_axis(places, best[..., None], -1)[..., 0]

    return run


def _max_pool_backward(dims: int) -> Callable[..., Array]:
    def run(grad: Array, x: Array, *geometry: Any) -> Array:
        indices = geometry[-1]
        lead = x.shape[:-dims]
        count = int(np.prod(x.shape[-dims:]))
        rows = int(np.prod(lead))
        flat = jnp.zeros((rows, count), jnp.promote_types(grad.dtype, jnp.float32))
        own = np.arange(rows)[:, None]
        flat = flat.at[own, indices.reshape(rows, -1)].add(grad.reshape(rows, -1))
        return flat.reshape(x.shape)

    return run


for _dims in (2, 3):
    lower(f"max_pool{_dims}d_with_indices")(_max_pool(_dims))
    lower(f"max_pool{_dims}d_with_indices_backward")(_max_pool_backward(_dims))


def _average(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | int,
    outputs: Sequence[int],
    counts_padding: bool,
    divisor: int | None,
) -> Array:
    dims = len(outputs)
    kernel, padding = _full(kernel, dims), _full(padding, dims)
    stride = _full(stride, dims) if stride else kernel
    windows = list(zip(kernel, stride, padding, (1,) * dims, strict=True))
    sums = jnp.sum(_windows(x, outputs, windows, 0)[0], -1)
    if divisor is not None:
        return sums / divisor
    sizes = np.ones((1,) * dims)
    for d, (size, step, pad, _) in enumerate(windows):
        length = x.shape[x.ndim - dims + d]
        start = np.arange(outputs[d]) * step - pad
        end = np.minimum(start + size, length + pad)
        if not counts_padding:
            start, end = np.maximum(start, 0), np.minimum(end, length)
        shape = [1] * dims
        shape[d] = outputs[d]
        sizes = sizes * (end - start).reshape(shape)
    return sums / sizes.astype(sums.dtype)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if x.dtype.kind not in "iub" else x


def _average_pool(dims: int) -> Callable[..., Array]:
    def run(
        x: Array,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        meta: Any,
    ) -> Array:
        outputs = tuple(meta.shape[-dims:])
        return _average(
            _wide(x), kernel, stride, padding, outputs, count_include_pad, divisor_override
        )

    return run


def _average_pool_backward(dims: int) -> Callable[..., Array]:
    def run(
        grad: Array,
        x: Array,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int] | int,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Array:
        outputs = tuple(grad.shape[-dims:])

        def forward(a: Array) -> Array:
            return _average(
                a, kernel, stride, padding, outputs, count_include_pad, divisor_override
            )

        return jax.vjp(forward, _wide(x))[1](_wide(grad))[0]

    return run


for _dims in (2, 3):
    lower(f"avg_pool{_dims}d")(_average_pool(_dims))
    lower(f"avg_pool{_dims}d_backward")(_average_pool_backward(_dims))


def _adaptive(x: Array, outputs: Sequence[int]) -> Array:
    """Means over windows that divide each dim as evenly as can be."""
    for d, count in enumerate(outputs):
        dim = x.ndim - len(outputs) + d
        length = x.shape[dim]
        mean = np.zeros((length, count), np.float64)
        for place in range(count):
            start, end = place * length // count, -(-(place + 1) * length // count)
            mean[start:end, place] = 1 / (end - start)
        x = jnp.moveaxis(jnp.moveaxis(x, dim, -1) @ jnp.asarray(mean, x.dtype), -1, dim)
    return x


@lower("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_pool(x: Array, output_size: Sequence[int]) -> Array:
    return _adaptive(_wide(x), output_size)


def _adaptive_backward(dims: int) -> Callable[..., Array]:
    def run(grad: Array, x: Array) -> Array:
        outputs = grad.shape[-dims:]
        return jax.vjp(lambda a: _adaptive(a, outputs), _wide(x))[1](_wide(grad))[0]

    return run


for _dims in (2, 3):
    lower(f"_adaptive_avg_pool{_dims}d_backward")(_adaptive_backward(_dims))
