"""Slices as values: names, shapes, chips, hosts and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.topology.accelerator_types import accelerator_type, parse_accelerator_type
from tpu_dist.topology.coordinates import Coord, Device, Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import GENERATIONS, find_generation
from tpu_dist.topology.shapes import nearest, possible_shapes
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.subslice import SubSlice
from tpu_dist.topology.system import System

EVERY_SMALL_SLICE = [
    Slice.of(generation, shape)
    for generation in GENERATIONS.values()
    for shape in possible_shapes(generation)
    if shape.volume <= 128
]


@pytest.mark.parametrize(
    ("text", "chips", "devices", "hosts"),
    [
        ("tpu7x:2x2x1", 4, 8, 1),
        ("tpu7x:4x4x8", 128, 256, 32),
        ("tpu7x:16x24x24", 9216, 18432, 2304),
        ("tpu7x:16x16x32", 8192, 16384, 2048),
        ("v5p:8x8x8", 512, 512, 128),
        ("v4:4x4x8", 128, 128, 32),
        ("v4:8x4x4", 128, 128, 32),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x2", 4, 4, 1),
        ("v5e:2x4", 8, 8, 1),
        ("v5e:4x8", 32, 32, 8),
        ("v6e:16x16", 256, 256, 64),
        ("v2:4x4", 16, 32, 4),
        ("v3:32x32", 1024, 2048, 256),
    ],
)
def test_a_slice_has_the_documented_numbers(
    text: str, chips: int, devices: int, hosts: int
) -> None:
    slice_ = Slice.parse(text)
    assert (slice_.num_chips, slice_.num_devices, slice_.num_hosts) == (chips, devices, hosts)
    assert str(slice_) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v5litepod-16", "v5e:4x4"),
        ("v5litepod-8", "v5e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v4-8", "v4:2x2x1"),
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("tpu7x-8", "tpu7x:2x2x1"),
        ("v3-32", "v3:4x4"),
        ("v2-512", "v2:16x16"),
    ],
)
def test_an_accelerator_type_is_its_slice(name: str, text: str) -> None:
    slice_ = parse_accelerator_type(name)
    assert str(slice_) == text
    assert accelerator_type(slice_) == name
    assert System.parse(name) == System.parse(text) == System(slice=slice_)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5p-512", "v5p:4x8x8, v5p:4x4x16"),
        ("tpu7x-512", "tpu7x:4x8x8, tpu7x:4x4x16"),
        ("v6e-10", "v6e-8 or v6e-16"),
        ("v5p-7", "v5p-8"),
        ("v9-8", "known are v2, v3"),
    ],
)
def test_a_name_that_is_ambiguous_or_wrong_is_refused_with_the_candidates(
    name: str, said: str
) -> None:
    with pytest.raises(TopologyError, match=said):
        System.parse(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpu7x:3x4x4", "nearest are tpu7x:4x4x4"),
        ("v6e:5x5", "its slices are 1x1, 2x2.*nearest are v6e:4x8"),
        ("v5p:8x4x4", "no axis longer than the next.*nearest are v5p:4x4x8"),
        ("tpu7x:16x24x28", "144 cubes"),
        ("v5e:32x32", "nearest are v5e:16x16"),
        ("v6e:4x4x4", "has 3 axes; a v6e slice has 2"),
        ("v5p:2x2", "has 2 axes; a v5p slice has 3"),
        ("v5p:0x2x2", "nearest are v5p"),
        ("tpu8t:4x4x4", "no TPU generation; known are"),
        ("v4:4x4x4_twisted", "cannot be twisted"),
        ("tpu7x:4x4x8_twisted", "cannot be twisted"),
        ("v6e:2x4*0", "names no slices"),
        ("16x16", "names no slice"),
        ("", "names no slices"),
        ("v5p:", "names no slice"),
        ("v5p:4x4x" + "4" * 5000, "names no slice"),
        ("v5p-" + "8" * 5000, "names no slice"),
        ("v6e:2x4*" + "2" * 5000, "names no slices"),
    ],
)
def test_an_impossible_slice_is_refused_with_what_is_near(text: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        System.parse(text)


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        System.parse(text)
    except TopologyError:
        pass


@given(st.sampled_from(sorted(GENERATIONS)), st.tuples(*[st.integers(1, 64)] * 3))
def test_every_shape_is_possible_or_answered_with_possible_ones(
    name: str, axes: tuple[int, int, int]
) -> None:
    generation = find_generation(name)
    shape = Shape(*axes[: generation.num_axes])
    try:
        Slice.of(generation, shape)
    except TopologyError as error:
        for near in nearest(generation, shape):
            assert Slice.of(generation, near).num_chips
            assert "x".join(map(str, near[: generation.num_axes])) in str(error)


@pytest.mark.parametrize("slice_", EVERY_SMALL_SLICE, ids=str)
def test_ranks_hosts_and_coordinates_are_one_to_one(slice_: Slice) -> None:
    devices = [slice_.device_at(rank) for rank in range(slice_.num_devices)]
    assert [slice_.rank_of(d.coord, d.core) for d in devices] == list(range(slice_.num_devices))
    assert devices == sorted(devices), "ranks are row-major, cores fastest"
    by_host = [d for host in range(slice_.num_hosts) for d in slice_.devices_of(host)]
    assert sorted(by_host) == devices
    for host in range(slice_.num_hosts):
        mine = slice_.devices_of(host)
        assert len(mine) == slice_.devices_per_host
        assert {slice_.host_of(device.coord) for device in mine} == {host}


def test_hosts_are_numbered_as_libtpu_numbers_them() -> None:
    """What libtpu 0.0.42 answers for tpu7x:4x4x8, v5e:4x8 and v3:8x8."""
    first = {
        "tpu7x:4x4x8": [(0, 0, 0), (2, 0, 0), (0, 2, 0), (2, 2, 0), (0, 0, 1), (2, 0, 1)],
        "v5e:4x8": [(0, 0, 0), (2, 0, 0), (0, 2, 0), (2, 2, 0), (0, 4, 0), (2, 4, 0)],
        "v3:8x8": [(0, 0, 0), (2, 0, 0), (4, 0, 0), (6, 0, 0), (0, 2, 0), (2, 2, 0)],
    }
    for text, corners in first.items():
        slice_ = Slice.parse(text)
        assert [min(slice_.chips_of(host)) for host in range(6)] == corners
    assert [d.core for d in Slice.parse("tpu7x:4x4x8").devices_of(0)] == [0, 1] * 4
    assert Slice.parse("v5e:4x8").chips_of(0) == ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0))


def test_hosts_of_eight_chips_are_2x4() -> None:
    slice_ = Slice.parse("v6e:4x8", chips_per_host=8)
    assert (slice_.num_hosts, slice_.host_grid, slice_.host_bounds) == (4, (2, 4, 1), (2, 2, 1))
    assert slice_.host_of(Coord(1, 3)) == 0
    assert slice_.host_of(Coord(2, 3)) == 1
    assert slice_.host_of(Coord(0, 4)) == 2
    with pytest.raises(TopologyError, match="cannot be made of hosts with 8 chips"):
        Slice.parse("v6e:2x2", chips_per_host=8)
    with pytest.raises(TopologyError, match="8 chips is not known; known are 1, 2, 4"):
        Slice.parse("v5p:4x4x4", chips_per_host=8)


@pytest.mark.parametrize(
    ("text", "wrap"),
    [
        ("tpu7x:4x4x4", (True, True, True)),
        ("v5p:4x4x12", (True, True, True)),
        ("v4:2x4x4", (False, False, False)),
        ("v5e:8x16", (False, True, False)),
        ("v6e:16x16", (True, True, False)),
        ("v6e:8x8", (False, False, False)),
        ("v2:16x16", (True, True, False)),
        ("v3:16x32", (False, True, False)),
    ],
)
def test_whole_cubes_and_full_axes_wrap(text: str, wrap: tuple[bool, bool, bool]) -> None:
    assert Slice.parse(text).wrap == wrap


def test_the_published_bandwidths_are_those_of_all_links() -> None:
    published = {"v5e": 400e9, "v6e": 800e9, "v5p": 1200e9, "tpu7x": 1200e9}
    for name, bandwidth in published.items():
        # Links are taken at what the scaling book measured: about a tenth below the published.
        assert 0.85 < GENERATIONS[name].ici_bandwidth / bandwidth <= 1


@pytest.mark.parametrize("name", ["v5litepod", "V5E", "tpu-v5-lite-podslice", "TPU v5 lite"])
def test_a_generation_has_many_names(name: str) -> None:
    assert find_generation(name).name == "v5e"


def test_several_slices_are_ranked_one_after_the_other() -> None:
    system = System.parse("tpu7x:4x4x4*3")
    assert (system.num_chips, system.num_devices, system.num_hosts) == (192, 384, 48)
    assert str(system) == "tpu7x:4x4x4*3"
    device = Device(2, Coord(0, 0, 1), 1)
    assert system.rank_of(device) == 2 * 128 + 3
    assert system.device_at(259) == device
    with pytest.raises(TopologyError, match="has no slice 3"):
        system.rank_of(device._replace(slice_index=3))
    with pytest.raises(TopologyError, match="384 devices, and none of rank 384"):
        system.device_at(384)


def test_a_subslice_keeps_a_ring_only_along_whole_axes() -> None:
    parent = Slice.parse("tpu7x:4x4x4")
    block = SubSlice(parent=parent, origin=Coord(2, 0, 0), shape=Shape(2, 4, 4))
    assert block.slice().wrap == (False, True, True)
    assert block.slice().num_hosts == 8
    assert block.ranks() == tuple(range(64, 128))
    assert block.coords()[0] == (2, 0, 0)
    assert Coord(3, 3, 3) in block
    assert Coord(1, 3, 3) not in block
    plane = SubSlice(parent=parent, origin=Coord(0, 0, 1), shape=Shape(4, 4, 1))
    assert all(parent.device_at(rank).coord.z == 1 for rank in plane.ranks())
    with pytest.raises(TopologyError, match="does not lie in"):
        SubSlice(parent=parent, origin=Coord(2, 0, 0), shape=Shape(4, 4, 4))
    cut = SubSlice(parent=parent, origin=Coord(1, 0, 0), shape=Shape(2, 2, 1))
    with pytest.raises(TopologyError, match="cuts through hosts"):
        cut.slice()
