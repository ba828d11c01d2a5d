"""Pointwise operators of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.scipy import special

from tpu_dist.runtime.operators.lowering import Cast, lower, lower_all

Array = Any


def is_complex(x: Array) -> bool:
    """Whether an array holds complex numbers."""
    return bool(x.dtype.kind == "c")


def _whole(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A rounding function, which leaves integers alone."""

    def run(x: Array) -> Array:
        return x if x.dtype.kind in "iub" else function(x)

    return run


def _sgn(x: Array) -> Array:
    if not is_complex(x):
        return jnp.sign(x)
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow where x is real."""
    return 1 / (1 + jnp.exp(-x)) if is_complex(x) else jax.nn.sigmoid(x)


def _silu(x: Array) -> Array:
    return x * sigmoid(x)


def _sinc(x: Array) -> Array:
    y = x * math.pi
    return jnp.where(x == 0, 1, jnp.sin(y) / jnp.where(x == 0, 1, y))


def _rsqrt(x: Array) -> Array:
    return 1 / jnp.sqrt(x) if is_complex(x) else lax.rsqrt(x)


def _relu(x: Array) -> Array:
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


def _digamma(x: Array) -> Array:
    at_zero = jnp.where(jnp.signbit(x), jnp.inf, -jnp.inf).astype(x.dtype)
    return jnp.where(x == 0, at_zero, special.digamma(x))


lower_all(
    {
        "acos": jnp.arccos,
        "acosh": jnp.arccosh,
        "asin": jnp.arcsin,
        "asinh": jnp.arcsinh,
        "atan": jnp.arctan,
        "atanh": jnp.arctanh,
        "bitwise_not": jnp.bitwise_not,
        "ceil": _whole(jnp.ceil),
        "_conj_physical": jnp.conj,
        "conj_physical": jnp.conj,
        "cos": jnp.cos,
        "cosh": jnp.cosh,
        "deg2rad": lambda x: x * (math.pi / 180),
        "digamma": _digamma,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "floor": _whole(jnp.floor),
        "frac": lambda x: x - jnp.trunc(x),
        "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6,
        "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
        "i0": special.i0,
        "lgamma": special.gammaln,
        "log": jnp.log,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
        "neg": jnp.negative,
        "rad2deg": lambda x: x * (180 / math.pi),
        "reciprocal": lambda x: 1 / x,
        "relu": _relu,
        "round": _whole(jnp.round),
        "rsqrt": _rsqrt,
        "sgn": _sgn,
        "sigmoid": sigmoid,
        "sign": jnp.sign,
        "silu": _silu,
        "sin": jnp.sin,
        "sinc": _sinc,
        "sinh": jnp.sinh,
        "special_i0e": special.i0e,
        "special_i1": special.i1,
        "special_i1e": special.i1e,
        "special_ndtri": special.ndtri,
        "sqrt": jnp.sqrt,
        "tan": jnp.tan,
        "tanh": jnp.tanh,
        "trunc": _whole(jnp.trunc),
    },
    cast=Cast.RESULT,
)


def _of_floats(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A question that is answered by no for integers."""

    def run(x: Array) -> Array:
        return jnp.zeros(x.shape, bool) if x.dtype.kind in "iub" else function(x)

    return run


def _signbit_of(x: Array) -> Array:
    if x.dtype.kind in "iu":
        return x < 0
    return jnp.zeros(x.shape, bool) if x.dtype.kind == "b" else jnp.signbit(x)


lower_all(
    {
        "abs": lambda x: x if x.dtype.kind == "b" else jnp.abs(x),
        "isfinite": jnp.isfinite,
        "isinf": _of_floats(jnp.isinf),
        "isnan": _of_floats(jnp.isnan),
        "isneginf": _of_floats(jnp.isneginf),
        "isposinf": _of_floats(jnp.isposinf),
        "logical_not": lambda x: x == 0,
        "signbit": _signbit_of,
    },
    cast=Cast.COMMON,
)


@lower("angle")
def _angle(x: Array) -> Array:
    if is_complex(x):
        return jnp.angle(x)
    if x.dtype.kind in "iub":
        x = x.astype(jnp.float32)
    return jnp.where(x < 0, math.pi, jnp.where(jnp.isnan(x), x, 0)).astype(x.dtype)


@lower("round.decimals", cast=Cast.RESULT)
def _round_to(x: Array, *, decimals: int) -> Array:
    if x.dtype.kind in "iu":
        return x
    factor = 10.0 ** abs(decimals)
    return jnp.round(x * factor) / factor if decimals > 0 else jnp.round(x / factor) * factor


@lower("nan_to_num", cast=Cast.RESULT, traced=("nan", "posinf", "neginf"))
def _nan_to_num(x: Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Array:
    if x.dtype.kind in "iub":
        return x
    part = jnp.finfo(x.dtype)

    def clean(y: Array) -> Array:
        y = jnp.where(jnp.isnan(y), 0 if nan is None else nan.real.astype(y.dtype), y)
        y = jnp.where(y == jnp.inf, part.max if posinf is None else posinf.real.astype(y.dtype), y)
        low = part.min if neginf is None else neginf.real.astype(y.dtype)
        return jnp.where(y == -jnp.inf, low, y)

    return lax.complex(clean(x.real), clean(x.imag)) if is_complex(x) else clean(x)


@lower("polar")
def _polar(size: Array, angle: Array) -> Array:
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@lower("complex")
def _complex(real: Array, imag: Array) -> Array:
    shape = jnp.broadcast_shapes(real.shape, imag.shape)
    return lax.complex(jnp.broadcast_to(real, shape), jnp.broadcast_to(imag, shape))


_FARTHEST = 4096.0  # steps that _zeta takes at most


def _zeta(s: int, x: Array) -> Array:
    """Hurwitz's zeta: the sum of (x + k) ** -s; JAX's is wrong for x below -8."""
    low = jnp.where(x > -_FARTHEST, x, 1.0)

    def is_low(state: tuple[Array, Array]) -> Array:
        return jnp.any(state[0] < 1)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        at, total = state
        return jnp.where(at < 1, at + 1, at), jnp.where(at < 1, total + at**-s, total)

    at, total = lax.while_loop(is_low, step, (low, jnp.zeros_like(x)))
    return total + special.zeta(jnp.asarray(s, x.dtype), jnp.where(x > -_FARTHEST, at, x))


@lower("polygamma", cast=Cast.RESULT, keep=(0,))
def _polygamma(n: int, x: Array) -> Array:
    if n == 0:
        return special.digamma(x)
    return (-1) ** (n + 1) * math.factorial(n) * _zeta(n + 1, x)
