"""Which dtypes collectives carry, and as what they cross the border between torch and JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch

from tpu_dist.topology.errors import UnsupportedError


class Kind(Enum):
    """What arithmetic a dtype has."""

    FLOAT = "float"
    INTEGER = "integer"
    BOOL = "bool"
    COMPLEX = "complex"


@dataclass(frozen=True, slots=True)
class WireType:
    """How one torch dtype is handled.

    Attributes:
        code: number that stands for it in an envelope; 1-based, in the order of the table.
        name: torch's name, which is JAX's too.
        carrier: torch dtype of the same width in which its bytes cross by DLPack.
        accumulate: JAX dtype in which partial results are kept inside one program; its own where
            None. Narrow floats lose less so.
    """

    code: int
    name: str
    kind: Kind
    carrier: torch.dtype
    accumulate: str | None = None


# dtype name: kind, carrier (None: itself), accumulate
_TABLE: Mapping[str, tuple[Kind, torch.dtype | None, str | None]] = {
    "float16": (Kind.FLOAT, None, "float32"),
    "bfloat16": (Kind.FLOAT, None, "float32"),
    "float32": (Kind.FLOAT, None, None),
    "float64": (Kind.FLOAT, None, None),
    "float8_e4m3fn": (Kind.FLOAT, torch.uint8, "float32"),
    "float8_e5m2": (Kind.FLOAT, torch.uint8, "float32"),
    "float8_e4m3fnuz": (Kind.FLOAT, torch.uint8, "float32"),
    "float8_e5m2fnuz": (Kind.FLOAT, torch.uint8, "float32"),
    "int8": (Kind.INTEGER, None, None),
    "int16": (Kind.INTEGER, None, None),
    "int32": (Kind.INTEGER, None, None),
    "int64": (Kind.INTEGER, None, None),
    "uint8": (Kind.INTEGER, None, None),
    "uint16": (Kind.INTEGER, torch.int16, None),
    "uint32": (Kind.INTEGER, torch.int32, None),
    "uint64": (Kind.INTEGER, torch.int64, None),
    "bool": (Kind.BOOL, torch.uint8, None),
    "complex64": (Kind.COMPLEX, None, None),
    "complex128": (Kind.COMPLEX, None, None),
}

WIRE_TYPES: Mapping[torch.dtype, WireType] = {
    getattr(torch, name): WireType(
        code=code,
        name=name,
        kind=kind,
        carrier=carrier or getattr(torch, name),
        accumulate=accumulate,
    )
    for code, (name, (kind, carrier, accumulate)) in enumerate(_TABLE.items(), start=1)
}

NAMES_BY_CODE: Mapping[int, str] = {wire.code: wire.name for wire in WIRE_TYPES.values()}


# What a dtype's bits may be summed as with zeros, to the bit, by its width in bytes.
_SUMMABLE = {1: "uint8", 2: "int16", 4: "int32"}


def moving_wire(wire: WireType, *, by_sums: bool = False) -> WireType:
    """Return as what a dtype crosses that is only moved, on platforms where its width matters.

    An array of bytes in another tiling is another array on a TPU: elements stay what they are.

    Args:
        wire: the dtype.
        by_sums: whether a program adds zeros to it.
    """
    name = str(wire.carrier).removeprefix("torch.")
    if by_sums:
        summable = _SUMMABLE.get(wire.carrier.itemsize)
        if summable is None:
            return WIRE_TYPES[torch.uint8]
        name = summable
    return replace(wire, name=name, kind=WIRE_TYPES[getattr(torch, name)].kind, accumulate=None)


def wire_type(dtype: torch.dtype) -> WireType:
    """Look up `dtype`.

    Raises:
        UnsupportedError: it is not carried; lists what is.
    """
    try:
        return WIRE_TYPES[dtype]
    except KeyError:
        raise UnsupportedError(
            f"collectives do not carry {dtype}; they carry {', '.join(_TABLE)}."
        ) from None
