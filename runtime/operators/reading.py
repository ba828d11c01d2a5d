"""Views, for those who need an array of the tensor's own shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tpu_dist.runtime.device.box import box_of
from tpu_dist.runtime.device.dtypes import array_dtype
from tpu_dist.runtime.device.geometry import read
from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.device.tensors import fill_storage
from tpu_dist.runtime.operators.offsets import offset_of
from tpu_dist.runtime.operators.programs import compile_program, is_tracing, program_cache
from tpu_dist.runtime.operators.templates import View

Array = Any

_readers = program_cache()
_zeros = program_cache()


def zeros(elements: int, dtype: np.dtype[Any]) -> Array:
    """A 1-d array of zeros, made on the device."""
    from jax import numpy as jnp

    key = (elements, dtype)
    program = _zeros.get(key)
    if program is None:
        program = _zeros[key] = compile_program(lambda: (jnp.zeros(elements, dtype),), [])
    return program()[0]


def read_view(tensor: torch.Tensor) -> Array:
    """The elements of a tensor on the device as an array of its shape; the storage's own, if so."""
    box = box_of(tensor)
    fill_storage(tensor, box)
    view = View.of(tensor, None)
    array = box.array
    if array is None:
        return place().put(np.zeros(view.size, array_dtype(view.dtype)))
    dtype = array_dtype(view.dtype)
    if is_tracing():
        return read(array, dtype, view.size, view.stride, view.offset)
    if array.shape == view.size and box.dtype is view.dtype and not view.offset:
        if tensor.is_contiguous():
            return array
    operands, token = [array], view.offset
    if token:
        elements = box.nbytes // view.dtype.itemsize
        token, at = offset_of(view.size, view.stride, view.offset, elements)
        operands += [] if at is None else [at]
    key = (array.shape, array.dtype, view.dtype, view.size, view.stride, token)
    reader = _readers.get(key)
    if reader is None:

        def run(operand: Array, at: Array = None) -> tuple[Array, ...]:
            return (read(operand, dtype, view.size, view.stride, view.offset, at),)

        reader = _readers[key] = compile_program(run, operands)
    return reader(*operands)[0]
