"""The TPU chips of this host, read from the PCI bus, without opening any of them.

Device ids, device nodes and devices a chip: jax's hardware_utils and tpu-info's device table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GOOGLE_VENDOR = "0x1ae0"


@dataclass(frozen=True, slots=True)
class Generation:
    """What one PCI device id says."""

    name: str
    devices_per_chip: int


# (PCI device, PCI subsystem device or None for any) -> generation
_GENERATIONS: Mapping[tuple[str, str | None], Generation] = {
    ("0x0027", "0x004e"): Generation("v2", 2),
    ("0x0027", "0x004f"): Generation("v3", 2),
    ("0x005e", None): Generation("v4", 1),
    ("0x0062", None): Generation("v5p", 1),
    ("0x0063", None): Generation("v5e", 1),
    ("0x006f", None): Generation("v6e", 1),
    ("0x0076", None): Generation("tpu7x", 2),
}


@dataclass(frozen=True, slots=True)
class HostChips:
    """The chips of one host."""

    generation: Generation
    num_chips: int

    @property
    def num_devices(self) -> int:
        """Devices (TensorCores that JAX sees one by one) on this host."""
        return self.num_chips * self.generation.devices_per_chip


def find_chips(root: Path = Path("/")) -> HostChips | None:
    """Count the TPU chips under `root`/sys/bus/pci/devices; None where there is none.

    Functions of one PCI device (domain:bus:device) are one chip, as on tpu7x, where both
    TensorCores show up.
    """
    found: dict[str, Generation] = {}
    for entry in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(entry / "vendor") != GOOGLE_VENDOR:
            continue
        device, subsystem = _read(entry / "device"), _read(entry / "subsystem_device")
        generation = _GENERATIONS.get((device, subsystem)) or _GENERATIONS.get((device, None))
        if generation is not None:
            found[entry.name.rpartition(".")[0] or entry.name] = generation
    if not found:
        return None
    return HostChips(generation=next(iter(found.values())), num_chips=len(found))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip().lower()
    except OSError:
        return ""
