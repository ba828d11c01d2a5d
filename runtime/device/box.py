"""The box: what a storage on the device holds, seen by every tensor that shares the storage.

It hangs on the UntypedStorage's Python object, which torch keeps as long as the C++ storage: so
aliases that are made in C++ (detach, .data, parameters, views) find it too.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from tpu_dist.runtime.device.calls import FILLING, WritingCall

Array = Any

_lock = threading.Lock()  # of every box that a collective writes to; the others need none


class Box:
    """The contents of one storage.

    A collective writes here on another thread. Once its wait() has returned, which it does at
    once, the array is *kept back*: the attribute is empty, so that who reads it comes to
    __getattr__, which waits for the call. Reading a box that no call writes to costs nothing more.

    Attributes:
        array: immutable; its elements in row-major order are the storage's. None: nothing was
            written yet, or the storage was freed. A tracer, while a decomposition is traced.
        dtype: of the array; views may read it as another.
        nbytes: length of the storage.
        shared: whether others hold the array (a clone, a collective under way): it must not be
            donated to a program then.
        sized: whether the C++ storage knows its length. That costs 2 us, and only as_strided asks.
        calls: the collectives under way that write here, and between which bytes.
    """

    __slots__ = (
        "__weakref__", "_kept", "_waited", "array", "calls", "dtype", "nbytes", "shared", "sized"
    )  # fmt: skip

    def __init__(self, array: Array, dtype: torch.dtype, nbytes: int) -> None:
        self.array = array
        self.dtype = dtype
        self.nbytes = nbytes
        self.shared = False
        self.sized = False
        self.calls: dict[WritingCall, tuple[int, int]] | None = None

    def __getattr__(self, name: str) -> Any:
        """The array, where it is kept back."""
        if name != "array":
            raise AttributeError(f"a box has no {name!r}")
        if not FILLING.depth:
            self.settle()
            return self.array  # comes here again if another wait() has kept it back meanwhile
        with _lock:
            return self._kept if self._waited else self.array

    def put(self, array: Array, dtype: torch.dtype) -> None:
        """Replace the contents by an array that nobody else holds."""
        if self.calls is not None:
            self._put_beside_calls(array)
        else:
            self.array = array
        self.dtype = dtype
        self.shared = False

    def _put_beside_calls(self, array: Array) -> None:
        if not FILLING.depth:
            self.settle()
        with _lock:
            if self.calls is not None and self._waited:
                self._kept = array
            else:
                self.array = array

    def share(self, other: Box) -> None:
        """Take the other's contents, without a copy: both know that they are two."""
        other.shared = True
        self.put(other.array, other.dtype)
        self.shared = True

    # --- the collectives that write here

    def begin(self, call: WritingCall, start: int, end: int) -> None:
        """A call will write to the bytes [start, end)."""
        with _lock:
            if self.calls is None:
                self.calls = {}
                self._waited: dict[WritingCall, None] = {}
            first, last = self.calls.get(call, (start, end))
            self.calls[call] = (min(first, start), max(last, end))

    def keep_back(self, call: WritingCall) -> None:
        """Have everybody who touches the contents wait for the call."""
        with _lock:
            if self.calls is not None and call in self.calls:
                if not self._waited:
                    self._kept = self.array
                    del self.array
                self._waited[call] = None

    def end(self, call: WritingCall, *, failed: bool = False) -> None:
        """The call is done; if it has failed, and was waited for, who comes next must be told."""
        with _lock:
            if self.calls is None or (failed and call in self._waited):
                return
            self.calls.pop(call, None)
            if self._waited:
                self._waited.pop(call, None)
                if not self._waited:
                    self.array, self._kept = self._kept, None
            if not self.calls:
                self.calls = None

    def settle(self) -> None:
        """Block until the calls that were waited for are done.

        Raises:
            CollectiveError: one has failed; whoever comes next finds what is there.
        """
        with _lock:
            waited = [] if self.calls is None else list(self._waited)
        for call in waited:
            try:
                call.settle()
            finally:
                self.end(call)

    def settle_between(self, start: int, end: int) -> None:
        """Block until no call writes to the bytes [start, end), whether it was waited for or not.

        Raises:
            CollectiveError: one that was waited for has failed.
        """
        with _lock:
            found = [
                (call, call in self._waited)
                for call, (first, last) in (self.calls or {}).items()
                if first < end and start < last
            ]
        for call, was_waited in found:
            with contextlib.nullcontext() if was_waited else contextlib.suppress(Exception):
                try:
                    call.settle()
                finally:
                    self.end(call)


def box_of(tensor: torch.Tensor) -> Box:
    """The box of a tensor on the device."""
    box: Box = tensor.untyped_storage()._tpu  # type: ignore[attr-defined]
    return box
