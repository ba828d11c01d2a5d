"""The border between torch tensors and jax arrays: the one place where data crosses.

CPU tensors enter the CPU platform without a copy, through DLPack, and leave with one; tensors on
the device are an array already, and take one for their own. Inside, a payload is flat.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy the narrow floats' names
import numpy as np
import torch
from torch._C import _to_dlpack

from tpu_dist.collectives.dtypes import WireType, wire_type
from tpu_dist.runtime.device.box import box_of
from tpu_dist.runtime.device.dtypes import TO_ARRAY
from tpu_dist.runtime.device.tensors import byte_range, is_on_device, wrap

Array = Any

ALIGNMENT = 64  # bytes; XLA's CPU client takes a buffer as it is only from there on


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in row-major order, 1-d; shares its memory where it can."""
    if not tensor.numel():  # an empty view may have strides that forbid more
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    on_device = is_on_device(tensor)
    if on_device:
        # One collective after the other, also if nobody has waited.
        box_of(tensor).settle_between(*byte_range(tensor))
    flattened = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # On the device a copy is free until one of both is written to: so what was passed is sent,
    # whatever becomes of the tensor meanwhile.
    return flattened.clone() if on_device else flattened


def is_remote(tensor: torch.Tensor) -> bool:
    """Whether a flat tensor's bytes are not in the host's memory, and must not come there."""
    return bool(tensor.numel()) and is_on_device(tensor)


def carry(tensor: torch.Tensor, wire: WireType) -> torch.Tensor:
    """A flat tensor, seen as the dtype in which it crosses."""
    return tensor.view(wire.carrier)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor, seen as bytes (uint8)."""
    return tensor.view(torch.uint8)


def to_array(tensor: torch.Tensor, device: Any) -> Array:
    """A tensor as an array on `device`; keep the tensor until the array has been read.

    On the CPU platform it shares a CPU tensor's memory.
    """
    if is_on_device(tensor):
        from tpu_dist.runtime.operators.reading import read_view

        return read_view(tensor)
    return (_share if device.platform == "cpu" else _upload)(tensor, device)


def copy_out(array: Array, target: torch.Tensor, device: Any) -> None:
    """Fill a flat tensor from the start of an array of this process, which is ready."""
    if not is_on_device(target):
        (_copy_memory if device.platform == "cpu" else _download)(array, target)
        return
    box = box_of(target)
    whole = target.numel() * target.element_size() == box.nbytes and target.is_contiguous()
    if whole and array.size == target.numel() and array.dtype == TO_ARRAY[target.dtype]:
        box.put(array, target.dtype)  # nobody else holds it
        return
    arrived = wrap(array.reshape(-1) if array.ndim > 1 else array, target.dtype, (array.size,))
    target.copy_(arrived if arrived.numel() == target.numel() else arrived[: target.numel()])


def _share(tensor: torch.Tensor, device: Any) -> Array:
    from jaxlib import _jax

    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()  # torch allocates aligned
    # jax.dlpack.from_dlpack does this in 50 us and canonicalises 64-bit dtypes; this is 8 us.
    return _jax.dlpack_managed_tensor_to_buffer(_to_dlpack(tensor), device, None)


def _upload(tensor: torch.Tensor, device: Any) -> Array:
    import jax

    host = raw(tensor).numpy()  # torch has no numpy() for the narrow floats
    host = host.view(wire_type(tensor.dtype).name)
    with jax.enable_x64(True):  # 64-bit dtypes stay what they are
        return jax.device_put(host, device)


def _copy_memory(array: Array, target: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), array.unsafe_buffer_pointer(), target.nbytes)


def _download(array: Array, target: torch.Tensor) -> None:
    host = np.array(array).view(np.uint8)
    raw(target).copy_(torch.from_numpy(host)[: target.nbytes])
