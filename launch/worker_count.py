"""How many workers a host gets: ``--nproc-per-node`` as a number or as a word."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpu_dist.launch.settings import Setting
from tpu_dist.topology.chips import TpuDevices

STAND_IN_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What this host has to run workers on.

    Attributes:
        num_cores: CPU cores that this process may use.
        devices: its TPU devices; those of the CPU stand-in are not among them.
        stand_in: whether the user asked for the CPU stand-in, so that the TPU does not count.
    """

    num_cores: int
    devices: TpuDevices
    stand_in: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCount:
    """A number of workers, and what the user should be told about the choice, if anything."""

    count: int
    notice: str | None = None


def count_workers(setting: Setting | None, host: Host) -> WorkerCount:
    """Return how many workers to start on ``host``.

    ``auto`` is one worker per TPU device. On a host without a TPU it is two workers, each with one
    CPU device, and a notice: the fewest with which a program is distributed at all. torchrun's
    ``auto`` starts one per CPU core there; here each worker carries an XLA client with a thread
    pool of its own as wide as the host, so that a large machine would be swamped before the first
    step. ``cpu`` is for who wants that. ``tpu`` is ``auto`` without the stand-in.

    Without the option there is one worker, as for torchrun.

    Raises:
        LaunchError: neither a known word nor a number from 1 to the number of devices, or devices
            that are there and cannot be used or counted.
    """
    if setting is None:
        return WorkerCount(count=1)
    if re.fullmatch(r"[+-]?\d+", setting.text, re.ASCII):
        return WorkerCount(count=_checked_number(setting, host))
    if setting.text in _OTHER_DEVICES:
        raise setting.error("tpu-launch starts workers for TPU devices; use torchrun for others")
    try:
        count = _WORDS[setting.text]
    except KeyError:
        raise setting.error(
            f"expected a number of workers, or one of {', '.join(_WORDS)}"
        ) from None
    return count(setting, host)


def _checked_number(setting: Setting, host: Host) -> int:
    number = int(setting.text)
    if number < 1:
        raise setting.error("at least one worker is needed")
    available = None if host.stand_in else host.devices.count
    if available and number > available:
        raise setting.error(
            f"this host has {_described(host.devices)}, and a device belongs to one worker. "
            f"Ask for at most {available}, or set JAX_PLATFORMS=cpu to run on CPU devices"
        )
    return number


def _auto(setting: Setting, host: Host) -> WorkerCount:
    if host.stand_in or not host.devices.chips_on_bus:
        why = "JAX_PLATFORMS excludes the TPU" if host.stand_in else "no TPU on this host"
        return WorkerCount(
            count=STAND_IN_WORKERS,
            notice=f"{why}: --nproc-per-node auto starts {STAND_IN_WORKERS} workers, "
            f"each with one CPU device; give a number for another count",
        )
    return WorkerCount(count=_num_devices(setting, host.devices))


def _tpu(setting: Setting, host: Host) -> WorkerCount:
    if not host.devices.chips_on_bus:
        raise setting.error("no TPU on this host; `auto` or a number run on CPU devices instead")
    return WorkerCount(count=_num_devices(setting, host.devices))


def _cpu(setting: Setting, host: Host) -> WorkerCount:
    return WorkerCount(count=host.num_cores)


def _num_devices(setting: Setting, devices: TpuDevices) -> int:
    count = devices.count
    if count is None:
        raise setting.error(
            f"this host has {_described(devices)}, and how many devices such a chip is is not "
            f"published: give a number"
        )
    if not count:
        raise setting.error(
            f"the PCI bus shows {_described(devices)}, but none of their files in /dev is here. "
            f"In a container: give it the devices (a resource request for google.com/tpu, or "
            f"--privileged)"
        )
    return count


def _described(devices: TpuDevices) -> str:
    name = devices.kind.name if devices.kind else "unknown"
    if not devices.count:
        return f"{devices.chips_on_bus} TPU {name} chips"
    return f"{devices.count} TPU devices ({devices.chips_usable} {name} chips)"


_WORDS: Mapping[str, Callable[[Setting, Host], WorkerCount]] = {
    "auto": _auto,
    "tpu": _tpu,
    "cpu": _cpu,
}
_OTHER_DEVICES = frozenset({"gpu", "xpu"})  # torchrun knows these words
