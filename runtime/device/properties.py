"""What the device is, and which devices a process has: one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpu_dist.runtime.device import memory
from tpu_dist.runtime.device.place import is_started, place

# JAX's name for a kind of device: the one by which programs look up what it can do (MFU tables).
_NAMES: Mapping[str, str] = {
    "TPU v2": "TPU v2",
    "TPU v3": "TPU v3",
    "TPU v4": "TPU v4",
    "TPU v5 lite": "TPU v5e",
    "TPU v5e": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v5p": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU v6e": "TPU v6e",
    "TPU7x": "TPU v7x",
    "TPU v7x": "TPU v7x",
}


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """See torch.cuda.get_device_properties."""

    name: str
    total_memory: int
    multi_processor_count: int
    platform: str


def check_index(device: Any) -> int:
    """The index of a device of this process: 0.

    Raises:
        ValueError: it is another, or no TPU.
    """
    if device is None:
        return 0
    if isinstance(device, int):
        index = device
    else:
        named = torch.device(device)
        if named.type != "tpu":
            raise ValueError(f"a device of type 'tpu' is wanted, got {named}")
        index = named.index or 0
    if index not in (0, -1):
        raise ValueError(
            f"tpu:{index} was asked for, and this process has one TPU device, tpu:0: each process "
            f"drives one. Do not number devices by LOCAL_RANK; torch.device('tpu') is this one's."
        )
    return 0


def device_count() -> int:
    """Devices of this process."""
    return 1


def is_available() -> bool:
    """Whether tensors can be on "tpu": always, as the CPU platform stands in for a TPU."""
    return True


def is_initialized() -> bool:
    """Whether the PJRT client is up: after init_process_group, or the first tensor."""
    return is_started()


def init() -> None:
    """Bring the client up, if it is not."""
    place()


def current_device() -> int:
    """The index of this process's device."""
    return 0


def set_device(device: Any) -> None:
    """See that `device` is this process's.

    LOCAL_RANK is taken, too: programs that drive a device by its number on the host pass it here,
    and it is the device that this process has.
    """
    if not isinstance(device, int):
        check_index(device)


def get_device_name(device: Any = None) -> str:
    """The device's generation, such as ``TPU v5e``; on the stand-in ``CPU (TPU stand-in)``."""
    check_index(device)
    home = place()
    if home.platform == "cpu":
        return "CPU (TPU stand-in)"
    return _NAMES.get(home.device.device_kind, home.device.device_kind)


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name, memory and number of cores."""
    home = place()
    cores = getattr(home.device, "num_cores", None) or 1
    return DeviceProperties(get_device_name(device), memory.total_memory(), cores, home.platform)


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """The dtypes that tensors can have."""
    from tpu_dist.runtime.device.dtypes import TO_ARRAY

    return {"supported_dtypes": set(TO_ARRAY)}


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Every TPU computes in bfloat16."""
    return True


class device(contextlib.AbstractContextManager[None]):  # noqa: N801  torch's name
    """torch.cuda.device for this backend: there is nothing to switch between."""

    def __init__(self, device: Any) -> None:
        check_index(device)

    def __exit__(self, *args: object) -> None:
        return None


@contextlib.contextmanager
def device_of(tensor: torch.Tensor) -> Iterator[None]:
    """The device of `tensor`, for the length of the block."""
    yield
