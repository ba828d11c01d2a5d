"""The border between torch tensors and jax arrays: the one place where data crosses.

CPU tensors enter through DLPack without a copy and leave with one. Inside, a payload is flat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _to_dlpack
from torch.utils.dlpack import from_dlpack

from tpu_dist.collectives.dtypes import WireType

Array = Any

ALIGNMENT = 64  # bytes; XLA's CPU client takes a buffer as it is only from there on


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in row-major order, 1-d; shares its memory where it can."""
    if not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)  # an empty view may have strides that forbid more
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def carry(tensor: torch.Tensor, wire: WireType) -> torch.Tensor:
    """A flat tensor, seen as the dtype in which it crosses."""
    return tensor.view(wire.carrier)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor, seen as bytes (uint8)."""
    return tensor.view(torch.uint8)


def to_array(tensor: torch.Tensor, device: Any) -> Array:
    """A flat CPU tensor as an array on `device`; shares its memory, so keep it until it is read."""
    from jaxlib import _jax

    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()  # torch allocates aligned
    # jax.dlpack.from_dlpack does this in 50 us and canonicalises 64-bit dtypes; this is 8 us.
    return _jax.dlpack_managed_tensor_to_buffer(_to_dlpack(tensor), device, None)


def to_tensor(array: Array) -> torch.Tensor:
    """An array of this process as a CPU tensor that shares its memory; do not write to it."""
    return from_dlpack(array.__dlpack__())
