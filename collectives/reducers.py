"""The reduce operations: what they are defined for, and how they are computed.

Written against what numpy and jax.numpy have in common, so that one text serves programs and the
few elements that arrive inside envelopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_dist.collectives.dtypes import Kind, WireType
from tpu_dist.topology.errors import UnsupportedError

Array = Any
Combine = Callable[[Array, Array], Array]

_NUMBERS = frozenset({Kind.FLOAT, Kind.INTEGER, Kind.COMPLEX})
_ORDERED = frozenset({Kind.FLOAT, Kind.INTEGER, Kind.BOOL})
_BITS = frozenset({Kind.INTEGER, Kind.BOOL})
_ALL = _NUMBERS | _BITS


@dataclass(frozen=True, slots=True)
class Reducer:
    """One reduce operation.

    Attributes:
        code: number that stands for it in an envelope.
        combine: name of the function of two arrays, in numpy and jax.numpy.
        combine_bool: the same for truth values (arithmetic on them saturates).
        kinds: the kinds of dtype that it is defined for.
        native: name of the collective in jax.lax that does it in one, if there is one.
    """

    code: int
    name: str
    combine: str
    combine_bool: str
    kinds: frozenset[Kind]
    native: str | None = None


# AVG and PREMUL_SUM are sums; what is done before and after is said where they are run.
REDUCERS: Mapping[str, Reducer] = {
    reducer.name: reducer
    for reducer in (
        Reducer(1, "SUM", "add", "logical_or", _ALL, "psum"),
        Reducer(2, "AVG", "add", "", _NUMBERS, "psum"),
        Reducer(3, "PRODUCT", "multiply", "logical_and", _ALL),
        Reducer(4, "MIN", "minimum", "logical_and", _ORDERED, "pmin"),
        Reducer(5, "MAX", "maximum", "logical_or", _ORDERED, "pmax"),
        Reducer(6, "BAND", "bitwise_and", "logical_and", _BITS),
        Reducer(7, "BOR", "bitwise_or", "logical_or", _BITS),
        Reducer(8, "BXOR", "bitwise_xor", "logical_xor", _BITS),
        Reducer(9, "PREMUL_SUM", "add", "", _NUMBERS - {Kind.INTEGER}, "psum"),
    )
}

NAMES_BY_CODE: Mapping[int, str] = {reducer.code: reducer.name for reducer in REDUCERS.values()}


def reducer_for(name: str, wire: WireType) -> Reducer:
    """Look up the operation `name` for a dtype.

    Raises:
        UnsupportedError: there is none of that name, or it is not defined for the dtype.
    """
    reducer = REDUCERS.get(name)
    if reducer is None:
        raise UnsupportedError(f"ReduceOp.{name} is not known; known are {', '.join(REDUCERS)}.")
    if wire.kind not in reducer.kinds:
        raise UnsupportedError(
            f"ReduceOp.{name} is not defined for {wire.name}; it is for "
            f"{', '.join(sorted(kind.value for kind in reducer.kinds))} dtypes."
        )
    return reducer


def combine(reducer: Reducer, wire: WireType, arrays: Sequence[Array], numpy: Any) -> Array:
    """Combine `arrays` in their order.

    Args:
        reducer: the operation.
        wire: the dtype that the arrays have.
        arrays: arrays of one shape, of dtype `wire.name` or of what it accumulates in.
        numpy: the module that the arrays belong to, numpy or jax.numpy.

    Returns:
        An array of the same shape, in the dtype that `wire` accumulates in.
    """
    name = reducer.combine_bool if wire.kind is Kind.BOOL else reducer.combine
    function: Combine = getattr(numpy, name)
    total = arrays[0].astype(wire.accumulate or wire.name)
    for array in arrays[1:]:
        total = function(total, array.astype(total.dtype))
    return total


def finish(reducer: Reducer, wire: WireType, total: Array, size: int, numpy: Any) -> Array:
    """Turn the combination of `size` ranks' arrays into the result, of dtype `wire.name`."""
    if reducer.name == "AVG" and size > 1:
        if wire.kind is Kind.INTEGER:
            # Toward zero, as NCCL does; wide, for the size may not fit into the dtype.
            wide = total.astype("uint64" if wire.name.startswith("u") else "int64")
            total = wide // size + ((wide < 0) & (wide % size != 0))
        else:
            total = total / size
    return total.astype(wire.name)
