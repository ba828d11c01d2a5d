"""The system that reported devices make up, in whichever order the ranks have them."""

from __future__ import annotations

import random

import pytest

from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.measured import ReportedDevice, measure
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System

KINDS = {
    "v5e": "TPU v5 lite",
    "v6e": "TPU v6 lite",
    "v5p": "TPU v5",
    "tpu7x": "TPU7x",
    "v3": "TPU v3",
}


def reported(rank_map: RankMap, *, origin: tuple[int, ...] = (0, 0, 0)) -> list[ReportedDevice]:
    system = rank_map.system
    devices = [rank_map.device_of(rank) for rank in range(system.num_devices)]
    return [
        ReportedDevice(
            kind=KINDS[system.slice.generation.name],
            slice_index=device.slice_index,
            coords=tuple(a + b for a, b in zip(device.coord, origin, strict=True)),
            core=device.core,
        )
        for device in devices
    ]


@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:4x8", "v5p:4x4x4", "tpu7x:2x2x2*2", "v3:4x4"])
def test_devices_are_the_slice_they_are(topology: str) -> None:
    system = System.parse(topology)
    for order in (RankMap.host_major(system), RankMap.row_major(system)):
        found = measure(reported(order, origin=(4, 8, 0)))
        assert str(found.system) == topology
        assert found.system.slice.wrap == system.slice.wrap
        assert found.devices.tolist() == order.devices.tolist()


def test_what_is_no_block_of_chips_is_refused() -> None:
    devices = reported(RankMap.row_major(System.parse("v6e:4x4")))
    random.Random(0).shuffle(devices)
    assert measure(devices).system.num_devices == 16
    with pytest.raises(TopologyError, match="16 devices, and each needs its rank; 15 ranks"):
        measure([device for device in devices if device.coords != (1, 1, 0)])
    with pytest.raises(TopologyError, match="16 ranks were given, with 15 different"):
        measure([devices[1], *devices[1:]])
    alien = ReportedDevice(kind="TPU v4", slice_index=0, coords=(0, 0, 0), core=0)
    with pytest.raises(TopologyError, match="must be of one kind"):
        measure([*devices, alien])
    other_slice = reported(RankMap.row_major(System.parse("v6e:2x2*2")))[4:]
    with pytest.raises(TopologyError, match="must have one shape, and have 2x2x1, 4x4x1"):
        measure([*devices, *other_slice])


def test_chips_of_another_number_of_devices_than_known_are_refused() -> None:
    cores = [
        ReportedDevice(kind="TPU v4", slice_index=0, coords=(0, 0, 0), core=core) for core in (0, 1)
    ]
    with pytest.raises(TopologyError, match="no device at .* core 1"):
        measure(cores)
