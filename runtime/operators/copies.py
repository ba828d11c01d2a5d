"""Copies: between host and device, between dtypes, between tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpu_dist.runtime.device.box import box_of
from tpu_dist.runtime.device.checks import raise_pending
from tpu_dist.runtime.device.geometry import dense_order
from tpu_dist.runtime.device.place import place
from tpu_dist.runtime.device.tensors import is_on_device, new_empty
from tpu_dist.runtime.device.transfer import laid_out, to_device, to_host, to_numpy
from tpu_dist.runtime.operators import pointwise_unary  # noqa: F401  conjugation is entered there
from tpu_dist.runtime.operators.creation import check_device
from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import LOWERINGS, lower
from tpu_dist.runtime.operators.operator import Operator
from tpu_dist.runtime.operators.programs import is_tracing
from tpu_dist.runtime.operators.reading import read_view
from tpu_dist.runtime.operators.writing_kernels import writing_kernel

Tensor = torch.Tensor
Array = Any
_aten = torch.ops.aten


@lower("copy", "_to_copy", "clone")
def _copied(self: Array, src: Array = None) -> Array:
    """The elements of `src`; kernels cast, broadcast and lay them out."""
    return self if src is None else src


_copy_in_place = writing_kernel(
    Operator(_aten.copy_.default, LOWERINGS["copy"], _aten.copy.default)
)
_cast = functional_kernel(Operator(_aten._to_copy.default, LOWERINGS["_to_copy"]))
_clone = functional_kernel(Operator(_aten.clone.default, LOWERINGS["clone"]))


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is all of its storage, contiguous and of the storage's dtype."""
    box = box_of(tensor)
    return (
        tensor.is_contiguous()
        and tensor.numel() * tensor.dtype.itemsize == box.nbytes
        and (box.array is None or box.dtype is tensor.dtype)
    )


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy `src`, from wherever and of whatever dtype, into `self`."""
    if self.device.type != "tpu":
        self.copy_(to_host(src))
        return self
    if self is src:
        return self
    if not is_on_device(src):
        _copy_from_host(self, src.to("cpu"))
        return self
    if src.is_conj() or src.is_neg():
        src = _resolved(src)
    if self.is_conj():
        copy_(torch._conj(self), torch.conj_physical(src))
        return self
    if self.is_neg():
        copy_(torch._neg_view(self), torch.neg(src))
        return self
    if (
        self.dtype is src.dtype
        and self.shape == src.shape
        and self.numel()
        and _is_plain(self)
        and _is_plain(src)
        and not is_tracing()
    ):
        read_view(src)  # gives it contents, if it has none
        box_of(self).share(box_of(src))
        return self
    return _copy_in_place(self, src, non_blocking)  # type: ignore[no-any-return]


def _resolved(self: Tensor) -> Tensor:
    """The elements that `self` shows, where its bits say that they are conjugated or negated."""
    if self.is_neg():
        self = torch.neg(torch._neg_view(self))
    return torch.conj_physical(torch._conj(self)) if self.is_conj() else self


def _copy_from_host(self: Tensor, src: Tensor) -> None:
    if not self.numel():
        _aten.copy_.default(torch.empty(self.shape, device="meta"), src.to("meta"))
        return
    source = src.detach().to(self.dtype)
    box = box_of(self)
    whole = self.numel() * self.dtype.itemsize == box.nbytes
    if whole and self.shape == source.shape and self.is_contiguous():
        box.put(to_device(source), self.dtype)
        return
    if whole and dense_order(self.shape, self.stride()) is not None:
        flat = laid_out(source, self.shape, self.stride())
        box.put(place().put(to_numpy(flat)), self.dtype)
        return
    there = new_empty(source.shape, source.dtype)
    if source.numel():
        box_of(there).put(to_device(source), source.dtype)
    _copy_in_place(self, there)


def _copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    return copy_(dst, self, non_blocking)


def to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """A copy of another dtype, or on another device."""
    wanted = dtype or self.dtype
    if self.is_conj() or self.is_neg():
        self = _resolved(self)
    if not is_on_device(self):
        return _from_elsewhere(self, wanted, device, memory_format)
    if device is None or device.type == "tpu":
        if is_tracing() or wanted is not self.dtype:
            return _cast(self, dtype=wanted, memory_format=memory_format)  # type: ignore[no-any-return]
        return clone(self, memory_format=memory_format)
    if device.type == "meta":
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return like.to(dtype=wanted, copy=True)
    host = to_host(self)
    options = {} if memory_format is None else {"memory_format": memory_format}
    return host.to(device=device, dtype=wanted, **options)  # type: ignore[call-overload,no-any-return]


def _from_elsewhere(
    self: Tensor,
    dtype: torch.dtype,
    device: torch.device | None,
    memory_format: torch.memory_format | None,
) -> Tensor:
    """A copy on the device of a tensor that is not; its strides are kept if they are dense."""
    check_device(device)
    keeps = memory_format in (None, torch.preserve_format)
    if keeps and self.is_contiguous():
        result = new_empty(self.shape, dtype)
    else:
        like = torch.empty_like(
            self, dtype=dtype, device="meta", memory_format=memory_format or torch.preserve_format
        )
        result = new_empty(like.shape, dtype, like.stride())
    return copy_(result, self)


def clone(self: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """A copy; where nothing needs to move, the array is shared until one of them is written to."""
    if self.is_conj() or self.is_neg():
        self = _resolved(self)
    if self.is_contiguous() and not is_tracing():
        keeps = memory_format in (None, torch.preserve_format, torch.contiguous_format)
        if keeps and _is_plain(self):
            result = new_empty(self.shape, self.dtype)
            box = box_of(self)
            if box.array is not None:
                box_of(result).share(box)
            return result
    return _clone(self, memory_format=memory_format)  # type: ignore[no-any-return]


def conj_physical(self: Tensor) -> Tensor:
    """The conjugated elements, in memory of their own."""
    return self.conj().clone() if self.is_conj() else _conjugate(self)


def local_scalar_dense(self: Tensor) -> Any:
    """The one element, as a Python number; waits for it."""
    if is_tracing():
        raise NotImplementedError("a value is asked for inside a decomposition")
    value = to_host(self).item()
    raise_pending()
    return value


def is_pinned(self: Tensor, device: torch.device | None = None) -> bool:
    """Tensors on the device are not in the host's memory."""
    return False


def record_stream(self: Tensor, stream: Any) -> None:
    """Nothing to note: an array lives until the programs that read it have ended."""


def equal(self: Tensor, other: Tensor) -> bool:
    """Whether both have the same shape and elements; waits for the answer."""
    if self.shape != other.shape:
        return False
    if other.device != self.device:
        raise RuntimeError(
            f"Cannot compare two tensors on different devices. Got: {self.device} and "
            f"{other.device}"
        )
    return bool(torch.eq(self, other).all().item())


_conj = _aten._conj_physical.default
_conjugate = functional_kernel(Operator(_conj, LOWERINGS["_conj_physical"]))

KERNELS: Mapping[str, Callable[..., Any]] = {
    "copy_": copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from,
    "_to_copy": to_copy,
    "clone": clone,
    "_conj_physical": conj_physical,
    "_local_scalar_dense": local_scalar_dense,
    "is_pinned": is_pinned,
    "record_stream": record_stream,
    "equal": equal,
}
