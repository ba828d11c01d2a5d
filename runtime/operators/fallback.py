"""What has no lowering: a decomposition into operators that have, else the CPU."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from tpu_dist.runtime.device.box import box_of
from tpu_dist.runtime.device.generator import next_key
from tpu_dist.runtime.device.tensors import is_on_device
from tpu_dist.runtime.device.transfer import to_host
from tpu_dist.runtime.environment import read_environment
from tpu_dist.runtime.operators.counters import COUNTERS
from tpu_dist.runtime.operators.programs import NotLowered, is_tracing
from tpu_dist.topology.errors import UnsupportedError

_warned: set[str] = set()


@functools.cache  # said once, at the process's start
def _is_refused() -> bool:
    return read_environment().fallback == "error"


def fall_back(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the CPU, on copies, and bring back what it returns and writes.

    Raises:
        UnsupportedError: TPU_DIST_FALLBACK=error refuses it.
    """
    name = str(op).removeprefix("aten.").removesuffix(".default")
    if is_tracing():
        raise NotLowered(f"{name} would run on the CPU, inside a decomposition")
    if _is_refused():
        raise UnsupportedError(
            f"{name} has no lowering to XLA for these arguments, and TPU_DIST_FALLBACK=error "
            f"refuses to run it on the CPU. Use another operator, or unset the variable."
        )
    COUNTERS.fallbacks[name] += 1
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} has no lowering to XLA and runs on the CPU, through copies "
            f"(TPU_DIST_FALLBACK=error refuses that)",
            stacklevel=2,
        )
    return _run_on_cpu(op, args, kwargs)


def _run_on_cpu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copies: dict[int, torch.Tensor] = {}
    kept: dict[int, torch.Tensor] = {}

    def to_cpu(value: Any) -> Any:
        if is_on_device(value):
            copy = copies.get(id(value))
            if copy is None:
                copy = copies[id(value)] = to_host(value)
                kept[id(value)] = value
            return copy
        if isinstance(value, torch.device) and value.type == "tpu":
            return torch.device("cpu")
        if isinstance(value, (list, tuple)):
            return [to_cpu(item) for item in value]
        return value

    arguments = op._schema.arguments
    on_cpu = [to_cpu(value) for value in args]
    named = {name: to_cpu(value) for name, value in kwargs.items()}
    _give_generator(arguments, len(args), named)
    result = op(*on_cpu, **named)
    written: dict[int, torch.Tensor] = {}
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and is_on_device(tensor):
                    _write_back(tensor, copies[id(tensor)])
                    written[id(copies[id(tensor)])] = tensor
    return _to_device(result, written)


def _give_generator(arguments: Any, num_args: int, named: dict[str, Any]) -> None:
    """Have the CPU draw from the device's generator, so that seeds mean what they say."""
    for position, argument in enumerate(arguments):
        if argument.name == "generator" and position >= num_args and not named.get("generator"):
            seed = int(next_key(None).view("uint64").sum()) & ((1 << 63) - 1)
            named["generator"] = torch._C.Generator().manual_seed(seed)


def _write_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.shape != copy.shape:
        torch.ops.aten.resize_.default(tensor, copy.shape)
    torch.ops.aten.copy_.default(tensor, copy)


def _to_device(value: Any, written: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        there = written.get(id(value))
        if there is not None:
            return there
        if value.layout is not torch.strided:
            return value
        target = torch.ops.aten.empty_strided.default(
            value.shape, value.stride(), dtype=value.dtype, device=torch.device("tpu")
        )
        box_of(target)
        return torch.ops.aten.copy_.default(target, value)
    if isinstance(value, (list, tuple)):
        items = [_to_device(item, written) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
