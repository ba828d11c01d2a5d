"""Where tensors live: the one PJRT device of this process, and the way of host data to it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from tpu_dist.runtime import runtime
from tpu_dist.runtime.client import (
    apply_environment,
    choose_platform,
    create_client,
    is_jax_initialised,
    one_device_a_rank,
    prepare_tpu,
)
from tpu_dist.runtime.environment import RuntimeConfig, read_environment
from tpu_dist.runtime.forks import client_started, refuse_forked_child
from tpu_dist.topology.errors import BringUpError

Array = Any

_START = timedelta(minutes=5)
_MAX_SCALARS = 4096


class Place:
    """A device, and what is kept for it.

    Attributes:
        device: JAX's Device.
        platform: ``tpu`` or ``cpu``.
    """

    def __init__(self, device: Any, platform: str) -> None:
        from jax import enable_x64
        from jax.core import ShapedArray
        from jax.sharding import SingleDeviceSharding
        from jaxlib import _jax

        self.device = device
        self.platform = platform
        self.sharding = SingleDeviceSharding(device)
        self._enable_x64 = enable_x64
        self._aval = ShapedArray
        self._put = _jax.batched_device_put
        self._scalars: dict[tuple[type, Any], Array] = {}

    def put(self, data: np.ndarray[Any, Any]) -> Array:
        """An array on the device that holds `data`; its dtype is kept, whatever JAX's defaults.

        The device may go on using the memory: hand over what nobody writes to any more.
        """
        aval = self._aval(data.shape, data.dtype)
        with self._enable_x64(True):  # else it is cast to 32 bits, whatever the aval says
            return self._put(aval, self.sharding, [data], [self.device])

    def scalar(self, value: bool | int | float | complex) -> Array:
        """A 0-d array of a Python number, 64 bits wide; recent ones are kept."""
        return self._kept_scalar(value, _WIDE[type(value)])

    def narrow_scalar(self, value: float) -> Array:
        """A 0-d array of float32, likewise; infinite where that has no such number."""
        return self._kept_scalar(value, np.float32)

    def _kept_scalar(self, value: bool | int | float | complex, dtype: type) -> Array:
        key = (dtype, value if value else repr(value))  # 0.0 and -0.0 are equal, yet not the same
        array = self._scalars.get(key)
        if array is None:
            if len(self._scalars) >= _MAX_SCALARS:
                self._scalars.clear()
            with np.errstate(over="ignore"):
                array = self._scalars[key] = self.put(np.asarray(value, dtype))
        return array


_WIDE: Mapping[type, type] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}

# One a process, as the PJRT client is.
_place: Place | None = None
_forgetters: list[Callable[[], None]] = []


def place() -> Place:
    """The place of this process's tensors; brings a client of its own up where none is.

    Raises:
        BringUpError: no client can be had here; says why.
    """
    return _place if _place is not None else _take_place()


def is_started() -> bool:
    """Whether some tensor has needed the device yet."""
    return _place is not None


def on_forget(callback: Callable[[], None]) -> Callable[[], None]:
    """Have `callback` called when the device goes: what is kept for it is of no more use."""
    _forgetters.append(callback)
    return callback


def forget_place() -> None:
    """Let go of the device: its client is about to be destroyed."""
    global _place
    _place = None
    for callback in _forgetters:
        callback()


def _take_place() -> Place:
    global _place
    refuse_forked_child()
    current = runtime.current_runtime()
    if current is None:
        platform, device = _world_of_one(read_environment())
    else:
        platform, device = current.platform, current.device
        current.at_close.append(forget_place)
    _place = Place(device, platform)
    client_started()
    _forget_in_children()
    return _place


@functools.cache  # once a process, and for those that it forks
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=forget_place)


def _world_of_one(config: RuntimeConfig) -> tuple[str, Any]:
    """A client for a process that has not called init_process_group; one may still follow.

    Raises:
        BringUpError: the launcher started several processes: they must join before they compute.
    """
    if (config.world_size or 1) > 1:
        raise BringUpError(
            f"a tensor on 'tpu' was made before init_process_group, in one of {config.world_size} "
            f"processes: a process has one PJRT client, and it must know the others when it "
            f"starts. Call init_process_group('tpu_dist') first."
        )
    platform = choose_platform(config)
    if is_jax_initialised():
        import jax

        return platform, one_device_a_rank(platform, jax.local_devices(), 1)[0]
    if platform == "tpu":
        alone = RuntimeConfig(local_rank=config.local_rank or 0, local_world_size=1)
        apply_environment(prepare_tpu(alone, os.environ))
    return platform, create_client(platform, 0, 1, None, _START)[0]
