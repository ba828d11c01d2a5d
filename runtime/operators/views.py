"""Operators that look at the same storage.

torch's own kernels for the CPU do it, as they only compute sizes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tpu_dist.runtime.device.box import Box, box_of
from tpu_dist.runtime.device.geometry import contiguous_strides, storage_extent
from tpu_dist.runtime.device.storage import resize_storage
from tpu_dist.runtime.device.tensors import give_length, new_empty, set_geometry

Tensor = torch.Tensor

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _cpu_kernel(overload: Any) -> Callable[..., Any]:
    return torch.library.get_kernel(overload, "CPU").call_boxed


_as_strided = _cpu_kernel(torch.ops.aten.as_strided.default)


def as_strided(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Any view; transpose, select, slice, expand and the like come to this."""
    storage = self.untyped_storage()
    box: Box = storage._tpu  # type: ignore[attr-defined]
    if not box.sized:
        give_length(storage, box)
    return _as_strided(_CPU, self, size, stride, storage_offset)  # type: ignore[no-any-return]


def as_strided_(
    self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Make `self` another view of its storage; squeeze_, transpose_ and the like come to this."""
    offset = int(self.storage_offset()) if storage_offset is None else storage_offset
    storage = self.untyped_storage()
    box = box_of(self)
    if storage_extent(size, stride, offset) * self.element_size() > box.nbytes:
        as_strided(self, size, stride, offset)  # raises what torch raises
    if not box.sized:
        give_length(storage, box)
    return set_geometry(self, storage, offset, size, stride)


def _delegate(overload: Any) -> Callable[..., Tensor]:
    kernel = _cpu_kernel(overload)

    def run(*args: Any) -> Tensor:
        return kernel(_CPU, *args)  # type: ignore[no-any-return]

    return run


def set_source_storage_offset(
    self: Tensor,
    source: torch.UntypedStorage,
    storage_offset: int,
    size: Sequence[int],
    stride: Sequence[int] = (),
) -> Tensor:
    """Make `self` a view of another storage."""
    strides = tuple(stride) or contiguous_strides(size)
    box: Box = source._tpu  # type: ignore[attr-defined]
    needed = storage_extent(size, strides, storage_offset) * self.element_size()
    if needed > box.nbytes:
        resize_storage(source, needed)
    if not box.sized:
        give_length(source, box)
    return set_geometry(self, source, storage_offset, size, strides)


def set_source_storage(self: Tensor, source: torch.UntypedStorage) -> Tensor:
    """Make `self` a 1-d view of all of a storage."""
    size = (source.nbytes() // self.element_size(),)
    return set_source_storage_offset(self, source, 0, size, (1,))


def set_source_tensor(self: Tensor, source: Tensor) -> Tensor:
    """Make `self` the same view as `source`."""
    storage = source.untyped_storage()
    return set_source_storage_offset(
        self, storage, int(source.storage_offset()), source.shape, source.stride()
    )


def set_empty(self: Tensor) -> Tensor:
    """Make `self` an empty tensor of its own."""
    return set_source_tensor(self, new_empty((0,), self.dtype))


def resize_(
    self: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> Tensor:
    """Change the shape; the storage grows if it must, and keeps its elements."""
    size = tuple(size)
    if size == tuple(self.shape):
        return self
    strides = contiguous_strides(size)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        like = torch.empty(size, device="meta", memory_format=memory_format)
        strides = tuple(like.stride())
    storage = self.untyped_storage()
    box = box_of(self)
    needed = storage_extent(size, strides, int(self.storage_offset())) * self.element_size()
    if needed > box.nbytes:
        resize_storage(storage, needed)
    if not box.sized:
        give_length(storage, box)
    return set_geometry(self, storage, int(self.storage_offset()), size, strides)


def _unsafe_view(self: Tensor, size: Sequence[int]) -> Tensor:
    return torch.ops.aten.view.default(self, size)  # type: ignore[no-any-return]


_aten = torch.ops.aten

KERNELS: Mapping[str, Callable[..., Any]] = {
    "as_strided": as_strided,
    "as_strided_": as_strided_,
    "view": _delegate(_aten.view.default),
    "view.dtype": _delegate(_aten.view.dtype),
    "_reshape_alias": _delegate(_aten._reshape_alias.default),
    "_unsafe_view": _unsafe_view,
    "unfold": _delegate(_aten.unfold.default),
    "view_as_real": _delegate(_aten.view_as_real.default),
    "view_as_complex": _delegate(_aten.view_as_complex.default),
    "set_.source_Storage_storage_offset": set_source_storage_offset,
    "set_.source_Storage": set_source_storage,
    "set_.source_Tensor": set_source_tensor,
    "set_": set_empty,
    "resize_": resize_,
}
