"""Activations, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jax.scipy import special

from tpu_dist.runtime.operators.lowering import Cast, lower, lower_all

Array = Any
Number = Any  # a 0-d array, or the schema's default, a Python number


def gradient(function: Callable[..., Array]) -> Callable[..., Array]:
    """From f(x, ...): the lowering (grad, x, ...) -> grad times f's derivative at x."""

    def run(grad: Array, x: Array, *rest: Any, **named: Any) -> Array:
        return jax.vjp(lambda y: function(y, *rest, **named), x)[1](grad)[0]

    return run


def _gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    return x * special.ndtr(x)


def _gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    return gradient(_gelu)(grad, x, approximate=approximate)


def _elu(x: Array, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Array:
    low = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, x * scale, jnp.expm1(low * input_scale) * (alpha * scale))


def _elu_backward(
    grad: Array, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Array
) -> Array:
    if is_result:
        low = grad * input_scale * (x + alpha * scale)
    else:
        low = grad * input_scale * alpha * scale * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, low, grad * scale)


def _softplus(x: Array, beta: Number = 1, threshold: Number = 20) -> Array:
    y = x * beta
    return jnp.where(y > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(y, threshold))) / beta)


def _softplus_backward(grad: Array, x: Array, beta: Number, threshold: Number) -> Array:
    y = x * beta
    return jnp.where(y > threshold, grad, grad * jax.nn.sigmoid(y))


def _leaky_relu(x: Array, slope: Number = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


def _leaky_relu_backward(grad: Array, x: Array, slope: Number, is_result: bool) -> Array:
    return jnp.where(x > 0, grad, grad * slope)


def _hardtanh(x: Array, low: Number = -1, high: Number = 1) -> Array:
    return jnp.minimum(jnp.maximum(x, low), high)


def _hardtanh_backward(grad: Array, x: Array, low: Number, high: Number) -> Array:
    return jnp.where((x <= low) | (x >= high), 0, grad)


def _hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return jnp.where((x > -3) & (x < 3), grad / 6, 0)


def _hardswish_backward(grad: Array, x: Array) -> Array:
    return jnp.where(x <= -3, 0, jnp.where(x < 3, grad * (x / 3 + 0.5), grad))


def _hardshrink(x: Array, lambd: Number = 0.5) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, x)


def _softshrink(x: Array, lambd: Number = 0.5) -> Array:
    shrunk = jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))
    return shrunk


def _shrink_backward(grad: Array, x: Array, lambd: Number) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad)


def _threshold(x: Array, threshold: Number, value: Number) -> Array:
    return jnp.where(x <= threshold, value, x)


def _threshold_backward(grad: Array, x: Array, threshold: Number) -> Array:
    return jnp.where(x <= threshold, 0, grad)


def _glu(x: Array, dim: int = -1) -> Array:
    first, second = jnp.split(x, 2, axis=dim)
    return first * jax.nn.sigmoid(second)


def _glu_backward(grad: Array, x: Array, dim: int) -> Array:
    return gradient(_glu)(grad, x, dim)


def _mish(x: Array) -> Array:
    return x * jnp.tanh(jax.nn.softplus(x))


def _silu(x: Array) -> Array:
    return x * jax.nn.sigmoid(x)


def _sigmoid_backward(grad: Array, y: Array) -> Array:
    return grad * jnp.conj((1 - y) * y)


def _tanh_backward(grad: Array, y: Array) -> Array:
    return grad * jnp.conj(1 - y * y)


lower_all(
    {
        "elu": _elu,
        "elu_backward": _elu_backward,
        "gelu": _gelu,
        "gelu_backward": _gelu_backward,
        "glu": _glu,
        "glu_backward": _glu_backward,
        "hardshrink": _hardshrink,
        "hardshrink_backward": _shrink_backward,
        "hardsigmoid_backward": _hardsigmoid_backward,
        "hardswish_backward": _hardswish_backward,
        "hardtanh": _hardtanh,
        "hardtanh_backward": _hardtanh_backward,
        "leaky_relu": _leaky_relu,
        "leaky_relu_backward": _leaky_relu_backward,
        "mish_backward": gradient(_mish),
        "sigmoid_backward": _sigmoid_backward,
        "silu_backward": gradient(_silu),
        "softplus": _softplus,
        "softplus_backward": _softplus_backward,
        "softshrink": _softshrink,
        "softshrink_backward": _shrink_backward,
        "tanh_backward": _tanh_backward,
        "threshold": _threshold,
        "threshold_backward": _threshold_backward,
    },
    cast=Cast.RESULT,
)


@lower("log_sigmoid_forward", cast=Cast.RESULT)
def _log_sigmoid_forward(x: Array, meta: Any) -> tuple[Array, Array]:
    return jax.nn.log_sigmoid(x), jnp.zeros(tuple(meta[1].shape), x.dtype)


@lower("log_sigmoid_backward", cast=Cast.RESULT, keep=(2,))
def _log_sigmoid_backward(grad: Array, x: Array, buffer: Array) -> Array:
    return grad * jax.nn.sigmoid(-x)


@lower("_prelu_kernel", cast=Cast.RESULT)
def _prelu(x: Array, weight: Array) -> Array:
    return jnp.where(x > 0, x, weight * x)


@lower("_prelu_kernel_backward", cast=Cast.RESULT)
def _prelu_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    return jnp.where(x > 0, grad, weight * grad), jnp.where(x > 0, 0, x * grad)
