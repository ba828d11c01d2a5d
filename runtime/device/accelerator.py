"""torch.accelerator for "tpu": what it asks C++ for, and C++ does not know of Python backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tpu_dist.runtime.device import memory, streams
from tpu_dist.runtime.dynamo import keep_out_dynamo

_OURS: dict[str, Callable[..., Any]] = {
    "current_stream": streams.current_stream,
    "empty_cache": memory.empty_cache,
    "empty_host_cache": lambda: None,
    "get_memory_info": memory.mem_get_info,
    "max_memory_allocated": memory.max_memory_allocated,
    "max_memory_reserved": memory.max_memory_reserved,
    "memory_allocated": memory.memory_allocated,
    "memory_reserved": memory.memory_reserved,
    "memory_stats": memory.memory_stats,
    "reset_accumulated_memory_stats": memory.reset_accumulated_memory_stats,
    "reset_peak_memory_stats": memory.reset_peak_memory_stats,
    "set_stream": streams.set_stream,
    "synchronize": streams.synchronize,
}


def patch_accelerator() -> None:
    """Have torch.accelerator ask us where the accelerator is "tpu"; once a process."""
    import torch.accelerator as accelerator

    for name, ours in _OURS.items():
        theirs = getattr(accelerator, name)
        chosen = _choose(theirs, ours)
        keep_out_dynamo(chosen, f"torch.accelerator.{name}")  # it calls them while it compiles
        for module in (accelerator, accelerator.memory):
            if hasattr(module, name):
                setattr(module, name, chosen)


def _choose(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        current = torch._C._get_accelerator()
        return (ours if current.type == "tpu" else theirs)(*args, **kwargs)

    return function
