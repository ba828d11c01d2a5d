"""From a call's arguments to a key, by which its program is looked up, and the program's operands.

This is the hot path: 1 us for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tpu_dist.runtime.device.box import Box
from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.device.tensors import fill_storage
from tpu_dist.runtime.device.transfer import to_numpy
from tpu_dist.runtime.operators.lowering import Lowering
from tpu_dist.runtime.operators.offsets import offset_of
from tpu_dist.runtime.operators.programs import TRACING
from tpu_dist.runtime.operators.templates import HostScalar, Number, View

Array = Any

# What an argument is, by its type in the operator's schema.
STATIC, TENSOR, TENSORS, NUMBER, NUMBERS, GENERATOR = range(6)

_KINDS = {
    "Tensor": TENSOR,
    "Optional[Tensor]": TENSOR,
    "List[Tensor]": TENSORS,
    "List[Optional[Tensor]]": TENSORS,
    "number": NUMBER,
    "Optional[number]": NUMBER,
    "List[number]": NUMBERS,
    "Optional[Generator]": GENERATOR,
    "Generator": GENERATOR,
}


def kind_of(argument: Any, lowering: Lowering) -> int:
    """What an argument of a schema is."""
    kind = _KINDS.get(str(argument.type), STATIC)
    if kind == STATIC and argument.name in lowering.traced:
        return NUMBER
    if kind in (NUMBER, NUMBERS) and ("*" in lowering.static or argument.name in lowering.static):
        return STATIC
    return kind


def collect(
    values: Iterable[Any],
    kinds: Iterable[int],
    key: list[Any],
    operands: list[Array],
    boxes: list[Box | None] | None,
) -> None:
    """Append what tells these arguments from others to `key`, and their arrays to `operands`.

    `boxes`, if given, gets the box of each operand, None for those that have none.
    """
    for value, kind in zip(values, kinds, strict=False):
        if kind == TENSOR:
            if type(value) in _NUMBERS:
                _collect_number(value, key, operands, boxes)
                continue
            try:
                box = value.untyped_storage()._tpu
            except AttributeError:
                _collect_other(value, key, operands, boxes)
                continue
            array = box.array
            if array is None:
                fill_storage(value, box)
                array = box.array
                if array is None:
                    key += (value.shape, value.stride(), value.dtype)
                    continue
            offset = value.storage_offset()
            if offset and not TRACING.depth:
                _collect_offset(value, box, offset, key, operands, boxes)
            else:
                key += (value.shape, value.stride(), offset, value.dtype, array.shape, box.dtype)
                operands.append(array)
                if boxes is not None:
                    boxes.append(box)
        elif kind == STATIC:
            key.append(tuple(value) if type(value) is list else value)
            if type(value) is float or type(value) is bool:
                key.append(repr(value))  # True == 1 == 1.0, and 0.0 == -0.0
        elif kind == TENSORS or kind == NUMBERS:
            if value is None:
                key.append(None)
            else:
                key.append(len(value))
                inner = TENSOR if kind == TENSORS else NUMBER
                collect(value, [inner] * len(value), key, operands, boxes)
        elif kind == NUMBER:
            if type(value) in _NUMBERS:
                _collect_number(value, key, operands, boxes)
            else:
                _collect_other(value, key, operands, boxes)


def _collect_offset(
    value: torch.Tensor,
    box: Box,
    offset: int,
    key: list[Any],
    operands: list[Array],
    boxes: list[Box | None] | None,
) -> None:
    """A tensor that begins somewhere in its storage."""
    array = box.array
    shape, stride, dtype = value.shape, value.stride(), value.dtype
    token, operand = offset_of(shape, stride, offset, box.nbytes // dtype.itemsize)
    key += (shape, stride, token, dtype, array.shape, box.dtype)
    operands.append(array)
    if boxes is not None:
        boxes.append(box)
    if operand is not None:
        operands.append(operand)
        if boxes is not None:
            boxes.append(None)


def _collect_other(
    value: Any, key: list[Any], operands: list[Array], boxes: list[Box | None] | None
) -> None:
    """None, a CPU tensor, or what stands for a number, where a tensor or a number may be."""
    if value is None:
        key.append(None)
        return
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0:
        key += ("host", value.dtype)
        operands.append(place().put(to_numpy(value.detach().clone())))
    elif isinstance(value, torch.Tensor):
        raise _wrong_device(value)
    else:
        key.append(type(value))
        operands.append(place().scalar(value.item() if hasattr(value, "item") else float(value)))
    if boxes is not None:
        boxes.append(None)


_NUMBERS = frozenset({bool, int, float, complex})


def _collect_number(
    value: bool | int | float | complex,
    key: list[Any],
    operands: list[Array],
    boxes: list[Box | None] | None,
) -> None:
    kind = type(value)
    key.append(kind)
    home = place()
    if kind is float and _is_narrow(operands):
        operands.append(home.narrow_scalar(value))  # type: ignore[arg-type]
    else:
        operands.append(home.scalar(value))
    if boxes is not None:
        boxes.append(None)


_WIDE = frozenset(np.dtype(name) for name in ("float64", "complex128"))


def _is_narrow(operands: list[Array]) -> bool:
    """Whether what is computed with these is float32 at most: 64-bit operands cost 2 us a call."""
    for operand in operands:
        if operand.dtype in _WIDE:
            return False
    return 0 < len(operands) <= 3


def _wrong_device(tensor: torch.Tensor) -> Exception:
    if tensor.layout is not torch.strided:
        return NotImplementedError(f"a tensor of layout {tensor.layout} on {tensor.device}")
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, tpu:0 and "
        f"{tensor.device}! Move the tensor of shape {tuple(tensor.shape)} with .to('tpu')."
    )


class TemplateMaker:
    """Walks arguments in collect()'s order, and numbers the operands as it does."""

    def __init__(self, numbers_as_tensors: bool = False) -> None:
        """Start.

        Args:
            numbers_as_tensors: whether a number where a tensor may be has to become one.
        """
        self.count = 0
        self._numbers_as_tensors = numbers_as_tensors

    def make(self, values: Sequence[Any], kinds: Sequence[int]) -> list[Any]:
        """The arguments with leaves for the operands."""
        return [self._one(value, kind) for value, kind in zip(values, kinds, strict=False)]

    def view(self, tensor: torch.Tensor) -> View:
        """A leaf for a tensor on the device, whose storage has been filled."""
        box: Box = tensor.untyped_storage()._tpu  # type: ignore[attr-defined]
        if box.array is None:
            return View.of(tensor, None)
        operand, at = self._next(), None
        offset = int(tensor.storage_offset())
        if offset and not TRACING.depth:
            elements = box.nbytes // tensor.dtype.itemsize
            if offset_of(tensor.shape, tensor.stride(), offset, elements).operand is not None:
                at = self._next()
        return View.of(tensor, operand, at)

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def _one(self, value: Any, kind: int) -> Any:
        if kind in (STATIC, GENERATOR):
            return value
        if kind in (TENSORS, NUMBERS):
            inner = TENSOR if kind == TENSORS else NUMBER
            return None if value is None else [self._one(item, inner) for item in value]
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                return HostScalar(self._next(), value)
            return self.view(value)
        if not isinstance(value, (bool, int, float, complex)):
            value = value.item() if hasattr(value, "item") else float(value)
        return Number(self._next(), value, kind == TENSOR and self._numbers_as_tensors)
