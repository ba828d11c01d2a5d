"""Which dtypes tensors on the device have, and what numpy and JAX call them."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes  # noqa: F401  gives numpy the narrow floats' names
import numpy as np
import torch

from tpu_dist.topology.errors import UnsupportedError

_NAMES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

TO_ARRAY: Mapping[torch.dtype, np.dtype] = {getattr(torch, name): np.dtype(name) for name in _NAMES}
TO_TORCH: Mapping[np.dtype, torch.dtype] = {array: dtype for dtype, array in TO_ARRAY.items()}

# numpy() and from_dlpack() know no narrow floats: their bytes cross as these.
CARRIERS: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def array_dtype(dtype: torch.dtype) -> np.dtype:
    """What JAX calls `dtype`.

    Raises:
        UnsupportedError: the device has no such dtype; lists those it has.
    """
    try:
        return TO_ARRAY[dtype]
    except KeyError:
        raise UnsupportedError(
            f"tensors on 'tpu' cannot be of {dtype}; they can be of {', '.join(_NAMES)}."
        ) from None
