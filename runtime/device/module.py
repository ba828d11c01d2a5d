"""`torch.tpu`: what torch.cuda is for GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from tpu_dist.runtime.device.generator import DEFAULT_GENERATOR
from tpu_dist.runtime.device.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from tpu_dist.runtime.device.modes import (
    EagerMode,
    Precision,
    eager_mode,
    precision,
    set_eager_mode,
)
from tpu_dist.runtime.device.properties import (
    check_index,
    current_device,
    device,
    device_count,
    device_of,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    is_available,
    is_bf16_supported,
    is_initialized,
    set_device,
)
from tpu_dist.runtime.device.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)
from tpu_dist.runtime.forks import is_forked_child

__all__ = [
    "EagerMode",
    "Event",
    "Precision",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "eager_mode",
    "empty_cache",
    "fallback_counts",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "num_compiled_programs",
    "precision",
    "reset_accumulated_memory_stats",
    "reset_fallback_counts",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_eager_mode",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

default_generators = (DEFAULT_GENERATOR,)


def device_module() -> ModuleType:
    """This module, as torch is to have it."""
    return sys.modules[__name__]


# --- random numbers


def manual_seed(seed: int) -> None:
    """Start the default generator's sequence of `seed`."""
    DEFAULT_GENERATOR.manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    """Start a sequence that nobody knows."""
    DEFAULT_GENERATOR.seed()


seed_all = seed


def initial_seed() -> int:
    """The seed of the default generator's sequence."""
    return DEFAULT_GENERATOR.initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The default generator's state: a CPU tensor of 16 bytes."""
    check_index(device)
    return DEFAULT_GENERATOR.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Go on from what get_rng_state() returned."""
    check_index(device)
    DEFAULT_GENERATOR.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices: of the one."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Go on from what get_rng_state_all() returned."""
    for state in new_states:
        set_rng_state(state)


# --- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that torch.autocast("tpu") may be given."""
    from tpu_dist.runtime.device.autocast import SUPPORTED

    return list(SUPPORTED)


# --- counters


def fallback_counts() -> dict[str, int]:
    """Operators that ran on the CPU, and how often, since the start or the last reset."""
    from tpu_dist.runtime.operators.counters import COUNTERS

    return dict(COUNTERS.fallbacks)


def reset_fallback_counts() -> None:
    """Count fallbacks from here."""
    from tpu_dist.runtime.operators.counters import COUNTERS

    COUNTERS.fallbacks.clear()


def num_compiled_programs() -> int:
    """XLA programs that operators were compiled to, since the start."""
    from tpu_dist.runtime.operators.counters import COUNTERS

    return COUNTERS.programs


# --- what torch looks for under these names


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one whose client was up: it cannot be used here."""
    return is_forked_child()


def _lazy_init() -> None:
    """What torch calls before it needs the device; ours comes up with the first tensor."""


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # TorchTitan reads it
        return is_initialized()
    raise AttributeError(f"module 'torch.tpu' has no attribute {name!r}")
