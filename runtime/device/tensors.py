"""Tensors around arrays, and the arrays in tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tpu_dist.runtime.device.box import Box
from tpu_dist.runtime.device.dtypes import TO_TORCH, array_dtype
from tpu_dist.runtime.device.geometry import contiguous_strides, storage_extent

Array = Any

create_empty = torch._C._acc.create_empty_tensor
"""Makes a contiguous tensor whose storage has no length and no memory."""

_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_set_geometry = torch.library.get_kernel(
    torch.ops.aten.set_.source_Storage_storage_offset, "Meta"
).call_boxed


def set_geometry(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Make `tensor` a view of `storage`; a C++ storage that is too short is lengthened."""
    _set_geometry(_META, tensor, storage, offset, size, stride)
    return tensor


def wrap(
    array: Array,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """A new tensor that owns `array`; stride None: contiguous."""
    tensor = create_empty(tuple(size), dtype)
    if stride is None:
        box = Box(array, dtype, math.prod(size) * dtype.itemsize)
        tensor.untyped_storage()._tpu = box  # type: ignore[attr-defined]
        return tensor
    box = Box(array, dtype, storage_extent(size, stride) * dtype.itemsize)
    storage = tensor.untyped_storage()
    storage._tpu = box  # type: ignore[attr-defined]
    set_geometry(tensor, storage, 0, size, stride)
    box.sized = True
    return tensor


def wrap_plain(array: Array) -> torch.Tensor:
    """A new contiguous tensor of the array's own shape and dtype."""
    return wrap(array, TO_TORCH[array.dtype], array.shape)


def new_empty(
    size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor without contents: reads as zeros until it is written to."""
    array_dtype(dtype)  # refuses what the device has not
    if stride is not None and tuple(stride) == contiguous_strides(size):
        stride = None
    return wrap(None, dtype, size, stride)


def give_length(storage: torch.UntypedStorage, box: Box) -> None:
    """Tell the C++ storage its length, which as_strided checks views against."""
    if box.nbytes > 0:
        bytes_view = create_empty((0,), torch.uint8)
        set_geometry(bytes_view, storage, 0, (box.nbytes,), (1,))
    box.sized = True


def is_on_device(value: object) -> bool:
    """Whether `value` is a dense tensor on the device."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "tpu"
        and value.layout is torch.strided
    )


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes [start, end) of its storage between which a tensor has all of its elements."""
    start = int(tensor.storage_offset())
    end = storage_extent(tensor.shape, tensor.stride(), start)
    size = tensor.element_size()
    return start * size, max(start, end) * size


def array_of_storage(tensor: torch.Tensor, box: Box) -> Array:
    """The array of a tensor's storage; zeros where nothing was written yet.

    Raises:
        RuntimeError: the storage was freed by resize_(0), and the tensor has elements.
    """
    if box.array is None:
        fill_storage(tensor, box)
    return box.array


_LARGE = 1 << 20  # bytes; below, sending zeros is cheaper than compiling a program for them


def fill_storage(tensor: torch.Tensor, box: Box) -> None:
    """Give a storage without contents some, as array_of_storage() says; others are left alone."""
    if box.array is not None or not tensor.numel():
        return
    if not box.nbytes:
        raise RuntimeError(
            f"the storage of a tpu tensor of shape {tuple(tensor.shape)} was freed by resize_(0); "
            f"resize it and write to it before it is read (FSDP: the parameter is not unsharded)."
        )
    import numpy as np

    from tpu_dist.runtime.device.place import place

    dtype = tensor.dtype
    if box.nbytes % dtype.itemsize:
        dtype = torch.uint8
    elements = box.nbytes // dtype.itemsize
    if box.nbytes > _LARGE:  # made there, not sent there
        from tpu_dist.runtime.operators.reading import zeros

        box.put(zeros(elements, array_dtype(dtype)), dtype)
    else:
        box.put(place().put(np.zeros(elements, array_dtype(dtype))), dtype)
