"""Where a view begins in its storage: a constant of the program, or one of its operands.

As a constant it lets XLA choose what is best for just this cut; but a loop over `x[i]` would
compile a program for every i. So the first few offsets that views of one geometry have are
constants (a model has few: the query, key and value in one product), and all others are operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_dist.runtime.device.geometry import Cut, cut_of
from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.operators.programs import program_cache

Array = Any

_CONSTANTS = 3  # besides 0
_MOST = 1 << 16
_INT32 = (1 << 31) - 1


class Offset(NamedTuple):
    """An offset, as a call has it.

    Attributes:
        token: stands for it in the key by which a program is looked up.
        operand: the offset as an array, where it is an operand of the program.
    """

    token: int
    operand: Array | None


_offsets: dict[Any, Offset] = program_cache()
_constants: dict[Any, int] = program_cache()


def offset_of(size: Sequence[int], stride: Sequence[int], offset: int, elements: int) -> Offset:
    """How the offset of a view is given to programs.

    Args:
        size: of the view.
        stride: of the view.
        offset: of the view, not 0.
        elements: how many the storage has, of the view's dtype.
    """
    key = (size, stride, offset, elements)
    found = _offsets.get(key)
    if found is None:
        if len(_offsets) >= _MOST:
            _offsets.clear()
        found = _offsets[key] = _choose(tuple(size), tuple(stride), offset, elements)
    return found


def _choose(size: tuple[int, ...], stride: tuple[int, ...], offset: int, elements: int) -> Offset:
    if not math.prod(size):
        return Offset(offset, None)
    geometry = (size, stride, elements)
    count = _constants.get(geometry, 0)
    if count < _CONSTANTS:
        _constants[geometry] = count + 1
        return Offset(offset, None)
    if elements > _INT32:
        return Offset(_token(cut_of(size, stride, offset), elements), place().scalar(offset))
    operand = place().put(np.asarray(offset, np.int32))  # 64 bits cost 2 us a call
    return Offset(_token(cut_of(size, stride, offset), elements), operand)


def _token(cut: Cut | None, elements: int) -> int:
    """One number for all offsets that the same program serves; no offset is negative."""
    return -1 if cut is None else -2 if cut.ends_inside(elements) else -3
