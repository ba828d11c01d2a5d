"""Between the host's memory and the device's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tpu_dist.runtime.device.box import box_of
from tpu_dist.runtime.device.dtypes import CARRIERS, TO_ARRAY, array_dtype
from tpu_dist.runtime.device.geometry import dense_order, storage_extent
from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.device.tensors import array_of_storage

Array = Any


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous CPU tensor's memory, as numpy sees it."""
    carrier = CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor.numpy()
    return tensor.view(carrier).numpy().view(TO_ARRAY[tensor.dtype])


def to_device(tensor: torch.Tensor) -> Array:
    """An array with a CPU tensor's elements in row-major order; never its memory."""
    array_dtype(tensor.dtype)
    source = tensor.detach().resolve_conj().resolve_neg()
    own = source.clone(memory_format=torch.contiguous_format)
    return place().put(to_numpy(own))


def laid_out(tensor: torch.Tensor, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor's elements, broadcast to `size`, 1-d in the order of a storage with `stride`."""
    extent = storage_extent(size, stride)
    storage = torch.zeros(extent, dtype=tensor.dtype)
    storage.as_strided(size, stride).copy_(tensor)
    return storage


def from_array(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of its own memory with an array's contents; waits for them."""
    host = np.asarray(array)
    carrier = CARRIERS.get(dtype)
    tensor = torch.empty(host.shape, dtype=carrier or dtype)
    tensor.numpy()[...] = host if carrier is None else host.view(TO_ARRAY[carrier])
    return tensor if carrier is None else tensor.view(dtype)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy of a tensor on the device, with its strides if it is dense; waits for it.

    Raises:
        IndexError, RuntimeError: an operator that ran before has found its input to be wrong.
    """
    from tpu_dist.runtime.device import checks

    if tensor.dtype not in TO_ARRAY:
        array_dtype(tensor.dtype)
    size, stride = tensor.shape, tensor.stride()
    box = box_of(tensor)
    if not tensor.numel():
        return torch.empty_strided(size, stride, dtype=tensor.dtype)
    array = array_of_storage(tensor, box)
    covers = tensor.numel() * tensor.dtype.itemsize == box.nbytes
    if covers and box.dtype is tensor.dtype and dense_order(size, stride) is not None:
        flat = from_array(array, box.dtype).view(-1)
    else:
        stride = torch.empty(size, device="meta").stride()
        from tpu_dist.runtime.operators.reading import read_view

        flat = from_array(read_view(tensor), tensor.dtype).reshape(-1)
    checks.raise_pending()
    result = flat.as_strided(size, stride)
    if tensor.is_conj():
        result = result.conj().resolve_conj()
    return result.neg() if tensor.is_neg() else result
