"""The scan of the PCI bus, on file trees that look like hosts."""

from pathlib import Path

import pytest

from tpu_dist.errors import BringUpError
from tpu_dist.runtime.client import choose_platform, prepare_tpu
from tpu_dist.runtime.environment import RuntimeConfig
from tpu_dist.topology.chips import find_chips


def add_device(
    root: Path, address: str, *, vendor: str = "0x1ae0", device: str, subsystem: str = "0x0000"
) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")
    (folder / "subsystem_device").write_text(subsystem + "\n")


@pytest.mark.parametrize(
    ("device", "subsystem", "name", "devices"),
    [
        ("0x0027", "0x004e", "v2", 8),
        ("0x0027", "0x004f", "v3", 8),
        ("0x005e", "0x0000", "v4", 4),
        ("0x0062", "0x0000", "v5p", 4),
        ("0x0063", "0x0000", "v5e", 4),
        ("0x006f", "0x0000", "v6e", 4),
        ("0x0076", "0x0000", "tpu7x", 8),
    ],
)
def test_each_generation_is_known(
    tmp_path: Path, device: str, subsystem: str, name: str, devices: int
) -> None:
    for slot in range(4):
        add_device(tmp_path, f"0000:0{slot}:00.0", device=device, subsystem=subsystem)
    chips = find_chips(tmp_path)
    assert chips is not None
    assert (chips.generation.name, chips.num_chips, chips.num_devices) == (name, 4, devices)


def test_functions_of_one_device_are_one_chip(tmp_path: Path) -> None:
    for slot in range(4):
        for function in range(2):
            add_device(tmp_path, f"0000:0{slot}:00.{function}", device="0x0076")
    chips = find_chips(tmp_path)
    assert chips is not None and (chips.num_chips, chips.num_devices) == (4, 8)


def test_devices_behind_other_domains_are_other_chips(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:05:00.0", device="0x0063")
    add_device(tmp_path, "0001:05:00.0", device="0x0063")
    chips = find_chips(tmp_path)
    assert chips is not None and chips.num_chips == 2


def test_other_hardware_is_passed_over(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:00:01.0", vendor="0x10de", device="0x0063")  # not Google's
    add_device(tmp_path, "0000:00:02.0", device="0x0042")  # Google's network card
    (tmp_path / "sys/bus/pci/devices/0000:00:03.0").mkdir()  # says nothing
    assert find_chips(tmp_path) is None


def test_capitals_in_the_ids_do_not_matter(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:05:00.0", vendor="0x1AE0", device="0x006F")
    chips = find_chips(tmp_path)
    assert chips is not None and chips.generation.name == "v6e"


def test_a_machine_without_a_pci_bus_has_no_chips(tmp_path: Path) -> None:
    assert find_chips(tmp_path) is None


def test_the_platform_is_tpu_where_there_are_chips(tmp_path: Path) -> None:
    assert choose_platform(RuntimeConfig(), tmp_path) == "cpu"
    add_device(tmp_path, "0000:05:00.0", device="0x0063")
    assert choose_platform(RuntimeConfig(), tmp_path) == "tpu"
    assert choose_platform(RuntimeConfig(platform="cpu"), tmp_path) == "cpu"


def test_a_tpu_that_is_not_there_is_refused_with_the_cure(tmp_path: Path) -> None:
    config = RuntimeConfig(platform="tpu", local_rank=0, local_world_size=1)
    with pytest.raises(BringUpError, match="no TPU chip is on this host's PCI bus. Unset it"):
        prepare_tpu(config, {}, tmp_path)


def test_a_process_that_does_not_know_its_place_is_refused(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:05:00.0", device="0x0063")
    with pytest.raises(BringUpError, match="LOCAL_RANK and LOCAL_WORLD_SIZE are not set.*torchrun"):
        prepare_tpu(RuntimeConfig(local_rank=0), {}, tmp_path)


def test_the_chips_of_the_bus_decide_what_libtpu_is_told(tmp_path: Path) -> None:
    for slot in range(4):
        add_device(tmp_path, f"0000:0{slot}:00.0", device="0x0076")
    config = RuntimeConfig(local_rank=5, local_world_size=8)
    variables = prepare_tpu(config, {}, tmp_path)
    assert variables["TPU_PROCESS_BOUNDS"] == "2,2,1,2"
    assert variables["TPU_VISIBLE_CHIPS"] == "5"
