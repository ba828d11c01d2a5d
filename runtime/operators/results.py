"""Results: from what a lowering returns to what tensors hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu_dist.runtime.device.dtypes import array_dtype

Array = Any


def as_result(value: Array, size: Sequence[int], dtype: torch.dtype) -> Array:
    """Cast and broadcast as torch's result is."""
    from jax import numpy as jnp

    value = jnp.asarray(value)
    wanted = array_dtype(dtype)
    if value.dtype != wanted:
        if value.dtype.kind == "c" and wanted.kind != "c":
            value = value.real
        value = value.astype(wanted)
    if value.shape != tuple(size):
        value = jnp.broadcast_to(value, tuple(size))
    return value
