"""What a rank can see to be wrong by itself: refused with ValueError before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpu_dist.collectives.dtypes import wire_type


def check_tensor(verb: str, tensor: object, role: str = "tensor") -> torch.Tensor:
    """See that `tensor` is one that collectives carry.

    Raises:
        TypeError: it is no tensor.
        ValueError: it holds no data here, or not densely.
        UnsupportedError: its dtype is not carried.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{verb}: {role} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type not in ("cpu", "tpu"):
        raise ValueError(
            f"{verb}: {role} is on device {tensor.device}; tensors on cpu and tpu are carried. "
            + ("A meta tensor holds no data: materialise it first." if tensor.is_meta else "")
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{verb}: {role} has layout {tensor.layout}; pass a dense tensor")
    wire_type(tensor.dtype)
    return tensor


def check_tensors(
    verb: str, tensors: Sequence[object], role: str, *, count: int | None = None
) -> list[torch.Tensor]:
    """See that there are `count` tensors, all of one dtype and on one device.

    Raises:
        ValueError: there are others.
    """
    if not isinstance(tensors, Sequence):
        raise TypeError(f"{verb}: {role} must be a list of tensors, got {type(tensors).__name__}")
    if count is not None and len(tensors) != count:
        raise ValueError(
            f"{verb}: {role} must hold one tensor for each of the {count} ranks, got {len(tensors)}"
        )
    checked = [
        check_tensor(verb, tensor, f"{role}[{index}]") for index, tensor in enumerate(tensors)
    ]
    dtypes = {tensor.dtype for tensor in checked}
    if len(dtypes) > 1:
        raise ValueError(
            f"{verb}: {role} must be of one dtype, got {', '.join(sorted(map(str, dtypes)))}"
        )
    devices = {str(tensor.device) for tensor in checked}
    if len(devices) > 1:
        raise ValueError(
            f"{verb}: {role} must be on one device, got {', '.join(sorted(devices))}; move them"
        )
    return checked


def check_output(verb: str, tensor: object, role: str = "tensor") -> torch.Tensor:
    """check_tensor() for one that is written to.

    Raises:
        ValueError: elements of it share memory.
    """
    checked = check_tensor(verb, tensor, role)
    steps = zip(checked.shape, checked.stride(), strict=True)
    if checked.numel() and any(size > 1 and not step for size, step in steps):
        raise ValueError(
            f"{verb}: {role} of shape {tuple(checked.shape)} is an expanded view, whose elements "
            f"share memory; it is written to, so pass a tensor of its own, as .contiguous() makes"
        )
    return checked


def check_outputs(verb: str, tensors: Sequence[object], count: int) -> list[torch.Tensor]:
    """check_tensors() for a list that is written to."""
    checked = check_tensors(verb, tensors, "outputs", count=count)
    return [check_output(verb, output, "outputs") for output in checked]


def only(verb: str, tensors: Any, role: str) -> Any:
    """The one element of a list of one, as c10d passes most tensors; or the thing itself."""
    if isinstance(tensors, (list, tuple)):
        if len(tensors) != 1:
            raise ValueError(f"{verb}: {role} must hold one element, got {len(tensors)}")
        return tensors[0]
    return tensors


def check_same_kind(verb: str, output: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ValueError unless both have one dtype, and are on one device."""
    if output.dtype != source.dtype:
        raise ValueError(
            f"{verb}: output is {output.dtype}, input is {source.dtype}; they must be the same"
        )
    if output.device != source.device:
        raise ValueError(
            f"{verb}: output is on {output.device}, input on {source.device}; they must be on one "
            f"device: move one of them with .to()"
        )


def check_count(verb: str, tensor: torch.Tensor, role: str, wanted: int, why: str) -> None:
    """Raise ValueError unless `tensor` has `wanted` elements."""
    if tensor.numel() != wanted:
        raise ValueError(
            f"{verb}: {role} of shape {tuple(tensor.shape)} has {tensor.numel()} elements, "
            f"{wanted} are needed: {why}"
        )


def check_rank(verb: str, rank: int, size: int, role: str) -> int:
    """Raise ValueError unless `rank` is a group rank."""
    if not 0 <= rank < size:
        raise ValueError(
            f"{verb}: {role} is {rank}, outside of the group's ranks 0 to {size - 1} "
            f"(group ranks are meant here)"
        )
    return rank


def split_sizes(
    verb: str, tensor: torch.Tensor, splits: Sequence[int], num_ranks: int, role: str
) -> list[int]:
    """Elements for each rank, from a list of rows; an empty list splits evenly.

    Raises:
        ValueError: the splits do not fit the tensor.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    row = tensor.numel() // rows if rows else 0
    if not splits:
        if rows % num_ranks:
            raise ValueError(
                f"{verb}: the {rows} rows of {role} cannot be divided among {num_ranks} ranks; "
                f"pass split sizes"
            )
        return [rows // num_ranks * row] * num_ranks
    if len(splits) != num_ranks:
        raise ValueError(
            f"{verb}: {role}_split_sizes needs one size for each of the {num_ranks} ranks, got "
            f"{len(splits)}"
        )
    if any(size < 0 for size in splits) or sum(splits) != rows:
        raise ValueError(
            f"{verb}: {role}_split_sizes {list(splits)} must be non-negative and sum up to the "
            f"{rows} rows of {role}; they sum up to {sum(splits)}"
        )
    return [size * row for size in splits]
