"""The box: what a storage on the device holds, seen by every tensor that shares the storage.

It hangs on the UntypedStorage's Python object, which torch keeps as long as the C++ storage: so
aliases that are made in C++ (detach, .data, parameters, views) find it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Array = Any


class Box:
    """The contents of one storage.

    Attributes:
        array: immutable; its elements in row-major order are the storage's. None: nothing was
            written yet, or the storage was freed. A tracer, while a decomposition is traced.
        dtype: of the array; views may read it as another.
        nbytes: length of the storage.
        shared: whether others hold the array (a clone, a collective under way): it must not be
            donated to a program then.
        pending: what waits for the collective that was last to write here; None if there is none.
        sized: whether the C++ storage knows its length. That costs 2 us, and only as_strided asks.
    """

    __slots__ = ("__weakref__", "array", "dtype", "nbytes", "pending", "shared", "sized")

    def __init__(self, array: Array, dtype: torch.dtype, nbytes: int) -> None:
        self.array = array
        self.dtype = dtype
        self.nbytes = nbytes
        self.shared = False
        self.sized = False
        self.pending: Callable[[], object] | None = None

    def settle(self) -> None:
        """Block until the collective that was last to write here, if any, has."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def put(self, array: Array, dtype: torch.dtype) -> None:
        """Replace the contents by an array that nobody else holds."""
        self.array = array
        self.dtype = dtype
        self.shared = False

    def share(self, other: Box) -> None:
        """Take the other's contents, without a copy: both know that they are two."""
        other.shared = True
        self.array = other.array
        self.dtype = other.dtype
        self.shared = True


def box_of(tensor: torch.Tensor) -> Box:
    """The box of a tensor on the device."""
    box: Box = tensor.untyped_storage()._tpu  # type: ignore[attr-defined]
    return box
