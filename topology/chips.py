"""The TPU chips of this host, counted from sysfs and /dev without touching a chip."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import GENERATIONS

_VENDOR = "0x1ae0"  # Google; its network and storage devices have it too


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipKind:
    """One generation of TPU chips, as far as counting its devices goes.

    Attributes:
        name: as people call it.
        node: the chip's file: /dev/accelN, or /dev/vfio/<IOMMU group>.
    """

    name: str
    node: Literal["accel", "vfio"]

    @property
    def devices_per_chip(self) -> int | None:
        """How many devices one chip is for a program; None where that is not published."""
        generation = GENERATIONS.get(self.name)
        return None if generation is None else generation.devices_per_chip


# By PCI device, and by PCI subsystem device where that is what tells two generations apart.
# Sources: jax/_src/hardware_utils.py (ids), tpu-info's device.py (ids, nodes).
_KINDS: Mapping[tuple[str, str | None], ChipKind] = {
    ("0x0027", "0x004e"): ChipKind(name="v2", node="accel"),
    ("0x0027", "0x004f"): ChipKind(name="v3", node="accel"),
    ("0x005e", None): ChipKind(name="v4", node="accel"),
    ("0x0062", None): ChipKind(name="v5p", node="vfio"),
    ("0x0063", None): ChipKind(name="v5e", node="vfio"),
    ("0x006f", None): ChipKind(name="v6e", node="vfio"),
    ("0x0076", None): ChipKind(name="tpu7x", node="vfio"),
    ("0x007c", None): ChipKind(name="tpu8t", node="vfio"),
    ("0x0083", None): ChipKind(name="tpu8i", node="vfio"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuDevices:
    """What a scan found.

    Attributes:
        kind: the chips' generation; None without a chip.
        chips_on_bus: chips that the PCI bus shows.
        chips_usable: those of them whose device file is there; a container may lack some.
    """

    kind: ChipKind | None = None
    chips_on_bus: int = 0
    chips_usable: int = 0

    @property
    def count(self) -> int | None:
        """Devices that programs on this host can use; None where nobody knows how many."""
        if self.kind is None or not self.chips_usable:
            return 0
        if self.kind.devices_per_chip is None:
            return None
        return self.chips_usable * self.kind.devices_per_chip


def scan_devices(root: Path = Path("/")) -> TpuDevices:
    """Count the TPU chips under ``root``: reads sysfs and lists /dev, and opens no device.

    Several PCI functions of one address are one chip: where a chip has two devices, the bus may
    show each as a function.

    Raises:
        TopologyError: chips of more than one generation.
    """
    chips: dict[str, tuple[ChipKind, Path]] = {}
    for function in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = _kind_of(function)
        if kind is not None:
            chips.setdefault(function.name.rpartition(".")[0], (kind, function))
    if not chips:
        return TpuDevices()
    kinds = {kind.name: kind for kind, _ in chips.values()}
    if len(kinds) > 1:
        raise TopologyError(
            f"TPU chips of several generations on one host ({', '.join(sorted(kinds))}), which "
            f"cannot be counted as one: set JAX_PLATFORMS=cpu or TPU_DIST_PLATFORM=cpu to leave "
            f"them alone, and give --nproc-per-node as a number"
        )
    (kind,) = kinds.values()
    return TpuDevices(
        kind=kind,
        chips_on_bus=len(chips),
        chips_usable=_num_usable(root, kind, [function for _, function in chips.values()]),
    )


def _kind_of(function: Path) -> ChipKind | None:
    if _read(function / "vendor") != _VENDOR:
        return None
    device = _read(function / "device")
    return _KINDS.get((device, None)) or _KINDS.get((device, _read(function / "subsystem_device")))


def _num_usable(root: Path, kind: ChipKind, chips: list[Path]) -> int:
    if kind.node == "accel":
        nodes = [
            node for node in (root / "dev").glob("accel*") if re.fullmatch(r"accel\d+", node.name)
        ]
        return min(len(nodes), len(chips))
    groups = [chip / "iommu_group" for chip in chips]
    return sum(
        group.is_symlink() and (root / "dev/vfio" / group.readlink().name).exists()
        for group in groups
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip().lower()
    except (OSError, UnicodeDecodeError):
        return ""
