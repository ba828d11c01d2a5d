"""Pointwise operators of several tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.scipy import special

from tpu_dist.runtime.operators.lowering import Cast, lower, lower_all
from tpu_dist.runtime.operators.pointwise_unary import is_complex

Array = Any
Number = Any  # a 0-d array, or the schema's default, a Python number


def scaled(x: Array, factor: Number) -> Array:
    """The product x * factor; x itself, bools too, where the factor is the default of 1."""
    return x if isinstance(factor, int) and factor == 1 else x * factor


def _sub(a: Array, b: Array, alpha: Number = 1) -> Array:
    return a - scaled(b, alpha)


lower_all(
    {
        "add.Tensor": lambda a, b, alpha=1: a + scaled(b, alpha),
        "sub.Tensor": _sub,
        "rsub.Tensor": lambda a, b, alpha=1: _sub(b, a, alpha),
        "rsub.Scalar": lambda a, b, alpha=1: _sub(b, a, alpha),
        "mul.Tensor": lambda a, b: a * b,
        "div.Tensor": lambda a, b: a / b,
    },
    cast=Cast.RESULT,
)


def _floor_divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iub":
        quotient = lax.div(a, b)
        return jnp.where((a % b != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)
    # As torch: exact where the remainder is known, a / b where the divisor is zero.
    remainder = lax.rem(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    down = jnp.floor(quotient)
    down = jnp.where(quotient - down > 0.5, down + 1, down)
    signed_zero = jnp.copysign(jnp.zeros_like(a), a / b)
    return jnp.where(b == 0, a / b, jnp.where(quotient != 0, down, signed_zero))


def _trunc_divide(a: Array, b: Array) -> Array:
    return lax.div(a, b) if a.dtype.kind in "iub" else jnp.trunc(a / b)


@lower("div.Tensor_mode", cast=Cast.RESULT)
def _div_mode(a: Array, b: Array, *, rounding_mode: str | None = None) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    table = {None: jnp.true_divide, "floor": _floor_divide, "trunc": _trunc_divide}
    return table[rounding_mode](a, b)


def _remainder(a: Array, b: Array) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    left = lax.rem(a, b)
    return jnp.where((left != 0) & ((left < 0) != (b < 0)), left + b, left)


def _fmod(a: Array, b: Array) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    return lax.rem(a, b)


def _floor_divide_any(a: Array, b: Array) -> Array:
    return _floor_divide(*jnp.broadcast_arrays(a, b))


def _xlogy(x: Array, y: Array) -> Array:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log(y)))


def _xlog1py(x: Array, y: Array) -> Array:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * jnp.log1p(y)))


def _heaviside(x: Array, values: Array) -> Array:
    return jnp.where(x == 0, values, (x > 0).astype(values.dtype))


def _integer_power(a: Array, b: Array) -> Array:
    """By squaring, with all bits of the exponent, modulo the dtype's range, as torch does it."""
    a, b = jnp.broadcast_arrays(a, b)
    bits = 8 * b.dtype.itemsize

    def step(place: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        result, square = state
        bit = lax.shift_right_logical(b, place.astype(b.dtype)) & 1
        return jnp.where(bit != 0, result * square, result), square * square

    result, _ = lax.fori_loop(0, bits, step, (jnp.ones_like(a), a))
    if b.dtype.kind == "u":
        return result
    # The only integers whose inverse is one.
    inverse = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(b % 2 == 0, 1, -1), 0))
    return jnp.where(b < 0, inverse.astype(a.dtype), result)


def _power(a: Array, b: Array) -> Array:
    if a.dtype.kind == "b":
        return a | ~b
    if a.dtype.kind in "iu":
        return _integer_power(a, b)
    if is_complex(a):
        result = jnp.exp(b * jnp.log(a))
        at_zero = jnp.where(b == 0, 1, jnp.where(b.real > 0, 0, result))
        return jnp.where(a == 0, at_zero, result)
    return jnp.power(a, b)


lower_all(
    {
        "atan2": jnp.arctan2,
        "bitwise_and.Tensor": jnp.bitwise_and,
        "bitwise_or.Tensor": jnp.bitwise_or,
        "bitwise_xor.Tensor": jnp.bitwise_xor,
        "bitwise_left_shift.Tensor": jnp.left_shift,
        "bitwise_right_shift.Tensor": jnp.right_shift,
        "__lshift__.Tensor": jnp.left_shift,
        "__rshift__.Tensor": jnp.right_shift,
        "__lshift__.Scalar": jnp.left_shift,
        "__rshift__.Scalar": jnp.right_shift,
        "copysign.Tensor": jnp.copysign,
        "floor_divide": _floor_divide_any,
        "fmax": jnp.fmax,
        "fmin": jnp.fmin,
        "fmod.Tensor": _fmod,
        "gcd": jnp.gcd,
        "heaviside": _heaviside,
        "hypot": jnp.hypot,
        "igamma": special.gammainc,
        "igammac": special.gammaincc,
        "lcm": jnp.lcm,
        "logaddexp": jnp.logaddexp,
        "logaddexp2": jnp.logaddexp2,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "nextafter": jnp.nextafter,
        "pow.Tensor_Tensor": _power,
        "pow.Scalar": _power,
        "remainder.Tensor": _remainder,
        "remainder.Scalar_Tensor": _remainder,
        "special_xlog1py": _xlog1py,
        "special_zeta": special.zeta,
        "xlogy.Tensor": _xlogy,
    },
    cast=Cast.RESULT,
)


@lower("pow.Tensor_Scalar", cast=Cast.RESULT, static=("exponent",))
def _pow_number(a: Array, exponent: Any) -> Array:
    if isinstance(exponent, complex) or is_complex(a):
        if isinstance(exponent, (int, float)) and exponent == 2:
            return a * a
        return _power(a, jnp.asarray(exponent, a.dtype))
    if isinstance(exponent, float) and exponent == int(exponent or 0) and abs(exponent) < 64:
        exponent = int(exponent)
    if isinstance(exponent, int) and abs(exponent) < 64:
        return lax.integer_pow(a, exponent) if exponent != 0 else jnp.ones_like(a)
    if exponent == 0.5:
        return jnp.sqrt(a)
    if exponent == -0.5:
        return lax.rsqrt(a)
    return jnp.power(a, jnp.asarray(exponent, a.dtype))


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "logical_xor": lambda a, b: (a != 0) ^ (b != 0),
}
lower_all(
    {f"{name}.{kind}": f for name, f in _COMPARISONS.items() for kind in ("Tensor", "Scalar")},
    cast=Cast.COMMON,
)
lower_all(_LOGIC, cast=Cast.NONE)


@lower("where.self", cast=Cast.RESULT, keep=(0,))
def _where(condition: Array, a: Array, b: Array) -> Array:
    return jnp.where(condition != 0, a, b)


@lower("masked_fill.Scalar", "masked_fill.Tensor", cast=Cast.RESULT, keep=(1,))
def _masked_fill(x: Array, mask: Array, value: Array) -> Array:
    return jnp.where(mask != 0, value, x)


@lower("clamp", "clamp.Tensor", cast=Cast.RESULT)
def _clamp(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    if low is not None:
        x = jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


lower("clamp_min", "clamp_min.Tensor", cast=Cast.RESULT)(lambda x, low: jnp.maximum(x, low))
lower("clamp_max", "clamp_max.Tensor", cast=Cast.RESULT)(lambda x, high: jnp.minimum(x, high))


@lower("lerp.Scalar", "lerp.Tensor", cast=Cast.RESULT)
def _lerp(start: Array, end: Array, weight: Array) -> Array:
    near = jnp.abs(weight) < 0.5
    return jnp.where(near, start + weight * (end - start), end - (end - start) * (1 - weight))


@lower("addcmul", cast=Cast.RESULT)
def _addcmul(x: Array, a: Array, b: Array, *, value: Number = 1) -> Array:
    return x + scaled(a, value) * b


@lower("addcdiv", cast=Cast.RESULT)
def _addcdiv(x: Array, a: Array, b: Array, *, value: Number = 1) -> Array:
    return x + scaled(a, value) / b
