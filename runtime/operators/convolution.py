"""Convolutions of any number of dims, their transposes, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from tpu_dist.runtime.operators.lowering import lower

Array = Any


def _full(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * dims if len(values) == 1 else tuple(values)


def _convolve(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    dims = weight.ndim - 2
    stride, padding, dilation = (_full(v, dims) for v in (stride, padding, dilation))
    spatial = "DHW"[-dims:] if dims <= 3 else ""
    layout = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
    options: dict[str, Any] = {"feature_group_count": groups, "rhs_dilation": dilation}
    if not transposed:
        options |= {"window_strides": stride, "padding": [(p, p) for p in padding]}
    else:
        # The gradient of a convolution: the kernel is turned round, the input spread out.
        into, outof = weight.shape[:2]
        kernel = weight.reshape(groups, into // groups, outof, *weight.shape[2:])
        kernel = jnp.swapaxes(kernel, 1, 2).reshape(
            groups * outof, into // groups, *weight.shape[2:]
        )
        weight = jnp.flip(kernel, tuple(range(2, kernel.ndim)))
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        extra = _full(output_padding, dims)
        options |= {
            "window_strides": (1,) * dims,
            "lhs_dilation": stride,
            "padding": [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)],
        }
    wide = jnp.float32 if x.dtype.name in ("float16", "bfloat16") else None
    return lax.conv_general_dilated(
        x, weight, dimension_numbers=layout, preferred_element_type=wide, **options
    )


def _forward(x: Array, weight: Array, bias: Array | None, *geometry: Any) -> Array:
    if x.ndim == weight.ndim - 1:
        return _forward(x[None], weight, bias, *geometry)[0]
    y = _convolve(x, weight, *geometry)
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape(1, -1, *(1,) * (y.ndim - 2))
    return y


lower("convolution_overrideable", multiplies=True, meta_of="convolution")(_forward)


@lower("convolution_backward_overrideable", multiplies=True, has_meta=False)
def _backward(
    grad: Array,
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Array | None, ...]:
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def forward(a: Array, w: Array) -> Array:
        return _convolve(a, w, *geometry)

    _, pull = jax.vjp(forward, x.astype(wide), weight.astype(wide))
    grad_x, grad_weight = pull(grad.astype(wide))
    grad_bias = jnp.sum(grad.astype(wide), (0, *range(2, grad.ndim)))
    results = (grad_x.astype(x.dtype), grad_weight.astype(weight.dtype), grad_bias.astype(x.dtype))
    return tuple(g if m else None for g, m in zip(results, output_mask, strict=True))
