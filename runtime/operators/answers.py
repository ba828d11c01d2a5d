"""What torch answers for a call's arguments: the result's shape, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpu_dist.runtime.operators.programs import NotLowered
from tpu_dist.runtime.operators.templates import HostScalar, Leaf, View, as_meta, map_leaves


def ask(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Meta tensors like the results of `op`, for arguments with leaves.

    Raises:
        Exception: the arguments do not fit: what the CPU raises for them.
        NotLowered: torch cannot tell without running the operator.
    """
    try:
        return op(
            *[as_meta(value) for value in args],
            **{name: as_meta(value) for name, value in kwargs.items()},
        )
    except Exception as error:  # meta kernels say it in words of their own: ask the CPU
        _run_on_zeros(op, args, kwargs)
        raise NotLowered(f"{op} has no meta kernel for this: {error}") from error


def _run_on_zeros(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call `op` on CPU tensors like the call's, to have it raise what is wrong with them."""

    def zeros(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, torch.Tensor):  # an out= tensor's meta
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
        return map_leaves(value, _zeros)

    op(*[zeros(v) for v in args], **{name: zeros(value) for name, value in kwargs.items()})


def _zeros(leaf: Leaf) -> Any:
    if isinstance(leaf, View):
        return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype).zero_()
    return leaf.tensor if isinstance(leaf, HostScalar) else leaf.meta()
