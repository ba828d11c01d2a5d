"""What the PCI bus and /dev say: the generation, and the chips that this host or container has."""

from __future__ import annotations

from pathlib import Path

from tpu_dist.topology.chips import scan_devices
from tpu_dist.topology.claims import Claim, Description
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import GENERATIONS


def describe_hardware(root: Path = Path("/")) -> Description:
    """Return what the chips under ``root`` say; nothing where there are none.

    Raises:
        TopologyError: chips of several generations, of one that is not supported, or none of them
            usable.
    """
    devices = scan_devices(root)
    if devices.kind is None:
        return Description()
    name = devices.kind.name
    if name not in GENERATIONS:
        raise TopologyError(
            f"this host has {devices.chips_on_bus} {name} chips, of which neither the devices of a "
            f"chip nor the shapes of slices are published; supported are {', '.join(GENERATIONS)}."
        )
    if not devices.chips_usable:
        raise TopologyError(
            f"this host has {devices.chips_on_bus} {name} chips on its PCI bus, and none of their "
            f"files in /dev. Give the container the devices (google.com/tpu, or --privileged)."
        )
    return Description(
        generation=Claim(GENERATIONS[name], f"the {name} chips on the PCI bus"),
        chips_per_host=Claim(devices.chips_usable, f"{devices.chips_usable} chips in /dev"),
    )
