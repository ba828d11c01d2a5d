"""The arguments of a call with the arrays taken out: what a program is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpu_dist.runtime.device.dtypes import array_dtype
from tpu_dist.runtime.device.geometry import read

Array = Any


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the call: how it lies in the array of an operand; operand None: no elements.

    Attributes:
        at: the operand that its offset is, where that differs between calls of one program; then
            `offset` is that of one call.
    """

    operand: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    at: int | None = None

    @staticmethod
    def of(tensor: torch.Tensor, operand: int | None, at: int | None = None) -> View:
        """The geometry of `tensor`."""
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return View(operand, tensor.dtype, size, stride, int(tensor.storage_offset()), at)

    def read(self, arrays: Sequence[Array]) -> Array:
        """Its elements."""
        array = None if self.operand is None else arrays[self.operand]
        dtype = array_dtype(self.dtype)
        at = None if self.at is None else arrays[self.at]
        return read(array, dtype, self.size, self.stride, self.offset, at)

    def meta(self) -> torch.Tensor:
        """A tensor like it without contents."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the call that is an operand."""

    operand: int
    value: bool | int | float | complex
    as_tensor: bool = False  # torch wants a tensor there, and makes none of a number

    def meta(self) -> Any:
        """What a meta kernel takes for it."""
        if not self.as_tensor:
            return self.value
        kinds = {
            bool: torch.bool,
            int: torch.int64,
            float: torch.get_default_dtype(),
            complex: torch.complex64,
        }
        return torch.scalar_tensor(self.value, dtype=kinds[type(self.value)])


@dataclass(frozen=True, slots=True)
class HostScalar:
    """A 0-d CPU tensor of the call: torch lets those mix with tensors of any device."""

    operand: int
    tensor: torch.Tensor


Leaf = View | Number | HostScalar


def map_leaves(value: Any, function: Callable[[Leaf], Any]) -> Any:
    """`value` with every leaf in it replaced."""
    if isinstance(value, Leaf):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [map_leaves(item, function) for item in value]
    return value


def leaves(value: Any) -> list[Leaf]:
    """All leaves, in order."""
    found: list[Leaf] = []
    map_leaves(value, found.append)
    return found


def as_meta(value: Any) -> Any:
    """The call's value as a meta kernel takes it."""
    if isinstance(value, (torch.device, torch.Generator)):
        return torch.device("meta") if isinstance(value, torch.device) else None
    return map_leaves(value, _leaf_meta)


def _leaf_meta(leaf: Leaf) -> Any:
    return leaf.tensor if isinstance(leaf, HostScalar) else leaf.meta()


def flatten(value: Any) -> list[Any]:
    """The items of nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flatten(part)]
    return [value]


def rebuild(shape: Any, items: Sequence[Any]) -> Any:
    """`items` in the nested lists and tuples of `shape`."""
    return _build(shape, iter(items))


def _build(part: Any, items: Iterator[Any]) -> Any:
    # No closure that calls itself: it would hold the tensors until the garbage collector came.
    if isinstance(part, (list, tuple)):
        built = [_build(item, items) for item in part]
        return built if type(part) is list else tuple(built)
    return next(items)
