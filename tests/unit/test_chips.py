"""The count of TPU devices on fake hosts, and what --nproc-per-node makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hosts import accel_host, add_function, vfio_host

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.settings import Setting
from tpu_dist.launch.worker_count import Host, WorkerCount, count_workers
from tpu_dist.topology.chips import TpuDevices, scan_devices
from tpu_dist.topology.errors import TopologyError


def v5e(root: Path) -> None:
    vfio_host(root, "0x0063", chips=8, nodes=8)


def v5e_container(root: Path) -> None:
    vfio_host(root, "0x0063", chips=8, nodes=4)


def v4(root: Path) -> None:
    accel_host(root, "0x005e", "0x0000", chips=4)


def v3(root: Path) -> None:
    accel_host(root, "0x0027", "0x004f", chips=4)


def tpu7x(root: Path) -> None:
    vfio_host(root, "0x0076", chips=4, nodes=4, functions=2)


def no_tpu(root: Path) -> None:
    add_function(root, "0000:00:03.0", "0x0042")  # Google's network device
    add_function(root, "0000:00:04.0", "0x001f")  # and its storage
    add_function(root, "0000:00:05.0", "0x0063", vendor="0x10de")
    (root / "sys/bus/pci/devices/0000:00:06.0").mkdir()


@pytest.mark.parametrize(
    ("host", "kind", "chips", "devices"),
    [
        (v5e, "v5e", 8, 8),
        (v5e_container, "v5e", 8, 4),
        (v4, "v4", 4, 4),
        (v3, "v3", 4, 8),
        (tpu7x, "tpu7x", 4, 8),
    ],
)
def test_devices_are_counted(
    tmp_path: Path, host: Callable[[Path], None], kind: str, chips: int, devices: int
) -> None:
    host(tmp_path)
    found = scan_devices(tmp_path)
    assert found.kind is not None
    assert (found.kind.name, found.chips_on_bus, found.count) == (kind, chips, devices)


def test_other_devices_of_the_vendor_are_no_tpu(tmp_path: Path) -> None:
    no_tpu(tmp_path)
    assert scan_devices(tmp_path) == TpuDevices()
    assert scan_devices(tmp_path / "nowhere") == TpuDevices()


def test_mixed_generations_are_refused(tmp_path: Path) -> None:
    add_function(tmp_path, "0000:00:04.0", "0x0063", group=0)
    add_function(tmp_path, "0000:00:05.0", "0x006f", group=1)
    with pytest.raises(TopologyError, match=r"several generations on one host \(v5e, v6e\)"):
        scan_devices(tmp_path)


def count(text: str | None, root: Path, *, stand_in: bool = False) -> WorkerCount:
    host = Host(num_cores=96, devices=scan_devices(root), stand_in=stand_in)
    return count_workers(None if text is None else Setting(text, "--nproc-per-node"), host)


def test_auto_is_one_worker_per_device(tmp_path: Path) -> None:
    tpu7x(tmp_path)
    assert count("auto", tmp_path) == WorkerCount(count=8)
    assert count("tpu", tmp_path) == WorkerCount(count=8)
    assert count("8", tmp_path) == count("tpu", tmp_path)
    assert count(None, tmp_path) == WorkerCount(count=1)


def test_auto_without_a_tpu_is_two_and_says_so(tmp_path: Path) -> None:
    no_tpu(tmp_path)
    found = count("auto", tmp_path)
    assert found.count == 2
    assert found.notice is not None and "no TPU on this host" in found.notice
    assert count("64", tmp_path) == WorkerCount(count=64)
    assert count("cpu", tmp_path) == WorkerCount(count=96)
    with pytest.raises(LaunchError, match="--nproc-per-node 'tpu': no TPU on this host"):
        count("tpu", tmp_path)


def test_more_workers_than_devices_are_refused(tmp_path: Path) -> None:
    v4(tmp_path)
    with pytest.raises(LaunchError, match=r"'5': this host has 4 TPU devices \(4 v4 chips\)"):
        count("5", tmp_path)
    assert count("5", tmp_path, stand_in=True) == WorkerCount(count=5)
    assert count("auto", tmp_path, stand_in=True).count == 2


def test_chips_without_their_files_are_no_silent_stand_in(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x0062", chips=4, nodes=0)
    with pytest.raises(LaunchError, match="shows 4 TPU v5p chips, but none of their files"):
        count("auto", tmp_path)


def test_chips_of_which_the_device_count_is_unknown_need_a_number(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x007c", chips=4, nodes=4)
    with pytest.raises(LaunchError, match="4 TPU tpu8t chips, .* give a number"):
        count("auto", tmp_path)
    assert count("8", tmp_path) == WorkerCount(count=8)
