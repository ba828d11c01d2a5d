"""What torch asks of a storage in Python: its length, copies, resizing, a place in a checkpoint.

Storages of other backends do this in C++, on memory that has an address. Ours have none: the
methods of torch.UntypedStorage answer from the box instead, where there is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpu_dist.runtime.device.box import Box
from tpu_dist.runtime.device.tensors import create_empty, give_length, new_empty

Storage = torch.UntypedStorage


def has_box(storage: Any) -> bool:
    """Whether a storage is one of ours."""
    return "_tpu" in storage.__dict__


def as_bytes(storage: Any) -> torch.Tensor:
    """A storage as a tensor of bytes, on whatever device it is."""
    if not has_box(storage):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    tensor = create_empty((0,), torch.uint8)
    torch.ops.aten.set_.source_Storage(tensor, storage)
    return tensor


def resize_storage(storage: Any, nbytes: int) -> None:
    """Change the length; 0 frees the array, more than there is keeps what is there."""
    box: Box = storage._tpu
    if nbytes == box.nbytes:
        return
    if nbytes == 0:
        box.put(None, box.dtype)
    elif box.array is not None and box.nbytes:
        kept = min(box.nbytes, nbytes)
        larger = new_empty((nbytes,), torch.uint8)
        larger.zero_()
        larger[:kept].copy_(as_bytes(storage)[:kept])
        box.share(larger.untyped_storage()._tpu)  # type: ignore[attr-defined]
        box.shared = False
    box.nbytes = nbytes
    give_length(storage, box)


def storage_to_host(storage: Any) -> Storage:
    """A CPU storage with the same bytes."""
    from tpu_dist.runtime.device.transfer import from_array

    box: Box = storage._tpu
    if not box.nbytes:
        return torch.UntypedStorage(0)
    if box.array is None:
        return torch.zeros(box.nbytes, dtype=torch.uint8).untyped_storage()
    return from_array(box.array, box.dtype).untyped_storage()


def storage_to_device(storage: Storage) -> Any:
    """A storage on the device with the bytes of one on the CPU."""
    return as_bytes(storage).to("tpu").untyped_storage()


def _deepcopy(storage: Any, memo: dict[Any, Any]) -> Any:
    seen = memo.setdefault("torch", {})
    copy = seen.get(storage._cdata)
    if copy is None:
        copy = seen[storage._cdata] = _clone_as_it_is(storage)
    return copy


def _clone_as_it_is(storage: Any) -> Any:
    """A copy whose array has the same dtype and shape: programs for it are there already."""
    box: Box = storage._tpu
    copy = new_empty((box.nbytes,), torch.uint8).untyped_storage()
    if box.array is not None:
        copy._tpu.share(box)  # type: ignore[attr-defined]
    return copy


def _copy(storage: Any, source: Any, non_blocking: bool | None = None) -> Any:
    as_bytes(storage).copy_(as_bytes(source))
    return storage


def _resize(storage: Any, nbytes: int) -> Any:
    resize_storage(storage, nbytes)
    return storage


def _to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    kind = torch.device(device).type
    if kind == "tpu":
        return storage
    return storage_to_host(storage).to(device=device)


def _set_from_file(storage: Any, file: Any, offset: Any, is_real_file: bool, size: int) -> Any:
    host = torch.UntypedStorage(storage._tpu.nbytes)
    host._set_from_file(file, offset, is_real_file, size)
    return _copy(storage, host)


_METHODS: dict[str, Callable[..., Any]] = {
    "size": lambda storage: storage._tpu.nbytes,
    "nbytes": lambda storage: storage._tpu.nbytes,
    "__len__": lambda storage: storage._tpu.nbytes,
    # Never an address: it tells storages apart, and is the same for all tensors of one.
    "data_ptr": lambda storage: id(storage._tpu),
    "resize_": _resize,
    "clone": _clone_as_it_is,
    "cpu": storage_to_host,
    "copy_": _copy,
    "to": _to,
    "__deepcopy__": _deepcopy,
    "_set_from_file": _set_from_file,
    "_write_file": lambda storage, *args: storage_to_host(storage)._write_file(*args),
    "tolist": lambda storage: storage_to_host(storage).tolist(),
    "is_pinned": lambda storage, device="cpu": False,
}


def patch_storage() -> None:
    """Teach torch.UntypedStorage about boxes; once a process."""
    for name, ours in _METHODS.items():
        setattr(Storage, name, _choose(getattr(Storage, name), ours))
    others_to = Storage.to

    @functools.wraps(others_to)
    def to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == "tpu" and not has_box(self):
            return storage_to_device(self)
        return others_to(self, device=device, non_blocking=non_blocking)

    others_copy = Storage.copy_

    @functools.wraps(others_copy)
    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        if has_box(source) and not has_box(self):
            return others_copy(self, storage_to_host(source), non_blocking)
        return others_copy(self, source, non_blocking)

    Storage.to = to  # type: ignore[method-assign]
    Storage.copy_ = copy_  # type: ignore[method-assign]
    torch.serialization.register_package(15, _tag, _restore)


def _choose(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_tpu" in self.__dict__:
            return ours(self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    return method


def _tag(storage: Any) -> str | None:
    return "tpu:0" if storage.device.type == "tpu" else None


def _restore(storage: Any, location: str) -> Any:
    if location.split(":")[0] != "tpu":
        return None
    return storage if has_box(storage) else storage_to_device(storage)
