"""Layouts of meshes: what each axis gets, that none is better, and that the model is the links'."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from rings import grid_links, ring_links, walk_round

from tpu_dist.topology.coordinates import Coord
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import GENERATIONS
from tpu_dist.topology.groups import Digit, Group, GroupKind
from tpu_dist.topology.mesh_layout import MeshLayout
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.rank_map import RankMap, coordinates
from tpu_dist.topology.shapes import possible_shapes
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.system import System

UP_TO_64_CHIPS = [
    Slice.of(generation, shape)
    for generation in GENERATIONS.values()
    for shape in possible_shapes(generation)
    if shape.volume <= 64
]


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def meshes(count: int) -> Iterator[tuple[int, ...]]:
    """Yield every mesh of one, two and three axes."""
    yield (count,)
    for outer in divisors(count):
        yield (outer, count // outer)
        for middle in divisors(count // outer):
            yield (outer, middle, count // outer // middle)


def coords_of_groups(layout: MeshLayout, axis: int) -> list[list[Coord]]:
    """Return the chips of each group; groups of a chip's other devices count as groups too."""
    table = coordinates(layout.system)
    return [
        sorted({Coord(*map(int, table[device][1:4])) for device in group})
        for group in layout.groups(axis)
    ]


def kinds(layout: MeshLayout) -> list[GroupKind]:
    return [axis.kind for axis in layout.axes]


@pytest.mark.parametrize(
    ("topology", "mesh", "expected"),
    [
        ("tpu7x:4x4x4", (8, 16), [(GroupKind.RING, 2), (GroupKind.PLANE, 2)]),
        ("tpu7x:4x4x4", (16, 8), [(GroupKind.PLANE, 2), (GroupKind.RING, 2)]),
        ("tpu7x:4x4x4", (32, 4), [(GroupKind.PLANE, 4), (GroupKind.RING, 1)]),
        ("tpu7x:4x4x4", (128,), [(GroupKind.CUBOID, 6)]),
        ("tpu7x:8x8x8", (64, 16), [(GroupKind.PLANE, 2), (GroupKind.RING, 2)]),
        ("tpu7x:8x8x8", (16, 64), [(GroupKind.RING, 2), (GroupKind.PLANE, 2)]),
        ("v5p:4x4x4", (4, 16), [(GroupKind.RING, 2), (GroupKind.PLANE, 4)]),
        ("v5p:4x4x4", (4, 4, 4), [(GroupKind.RING, 2)] * 3),
        ("v6e:16x16", (16, 16), [(GroupKind.RING, 2)] * 2),
        (
            "tpu7x:8x8x8",
            (8, 16, 8),
            [(GroupKind.RING, 1), (GroupKind.SPREAD, 0.5), (GroupKind.BLOCK, 2)],
        ),
        ("v6e:16x16", (64, 4), [(GroupKind.SPREAD, 1), (GroupKind.BLOCK, 2)]),
    ],
)
def test_axes_are_rings_planes_and_blocks(
    topology: str, mesh: tuple[int, ...], expected: list[tuple[GroupKind, float]]
) -> None:
    layout = lay_out_mesh(System.parse(topology), mesh)
    assert [(axis.kind, axis.group.num_links) for axis in layout.axes] == expected


def test_the_two_cores_of_a_chip_are_an_axis_of_their_own_where_it_fits() -> None:
    layout = lay_out_mesh(System.parse("tpu7x:4x4x4"), (64, 2))
    assert kinds(layout) == [GroupKind.CUBOID, GroupKind.CORES]
    assert layout.devices().tolist()[3] == [6, 7]


@pytest.mark.parametrize("slice_", UP_TO_64_CHIPS, ids=str)
def test_no_other_layout_is_better(slice_: Slice) -> None:
    """Every way to give the axes' smallest factors to the mesh's axes, for every mesh."""
    system = System(slice=slice_)
    atoms = prime_digits(slice_)
    every = [mesh for mesh in meshes(slice_.num_devices) if math.prod(mesh) == slice_.num_devices]
    chance = random.Random(str(slice_))
    for mesh in every if len(every) <= 30 else chance.sample(every, 30):
        layout = lay_out_mesh(system, mesh)
        ours = weighed(layout.costs)
        for groups in assignments(slice_, atoms, mesh):
            assert weighed([group.gather_cost for group in groups]) > ours - 1e-6, (mesh, groups)


def weighed(costs: tuple[float, ...] | list[float]) -> float:
    return sum(cost * 4**index for index, cost in enumerate(costs))


def prime_digits(slice_: Slice) -> list[Digit]:
    digits = []
    for axis, extent in enumerate((*slice_.shape, slice_.generation.devices_per_chip)):
        stride = 1
        for prime in (2, 3, 5, 7):
            while extent % prime == 0:
                digits.append(Digit(axis=axis, size=prime, stride=stride))
                stride, extent = stride * prime, extent // prime
        assert extent == 1
    return digits


def assignments(slice_: Slice, atoms: list[Digit], mesh: tuple[int, ...]) -> Iterator[list[Group]]:
    """Yield the groups of every assignment in which an axis's positions of one owner touch."""
    for owners in _owners(atoms, list(mesh)):
        groups = []
        for mesh_axis in range(len(mesh)):
            mine = [atom for atom, owner in zip(atoms, owners, strict=True) if owner == mesh_axis]
            merged = []
            for axis in range(4):
                parts = [atom for atom in mine if atom.axis == axis]
                size = math.prod(part.size for part in parts)
                if not parts:
                    continue
                if size * parts[0].stride != parts[-1].size * parts[-1].stride:
                    break  # not next to each other
                merged.append(Digit(axis=axis, size=size, stride=parts[0].stride))
            else:
                groups.append(Group(slice=slice_, digits=tuple(merged)))
                continue
            break
        else:
            yield groups


def _owners(atoms: list[Digit], left: list[int]) -> Iterator[list[int]]:
    if not atoms:
        yield []
        return
    for owner, size in enumerate(left):
        if size % atoms[0].size == 0:
            rest = left.copy()
            rest[owner] //= atoms[0].size
            for others in _owners(atoms[1:], rest):
                yield [owner, *others]


@pytest.mark.parametrize("slice_", UP_TO_64_CHIPS, ids=str)
def test_the_links_of_the_model_are_there(slice_: Slice) -> None:
    """The walk of every message over every link finds as many links as the formula, or more."""
    system = System(slice=slice_)
    chance = random.Random(str(slice_))
    every = list(meshes(slice_.num_devices))
    for mesh in chance.sample(every, min(12, len(every))):
        layout = lay_out_mesh(system, mesh)
        for index, axis in enumerate(layout.axes):
            if axis.group.num_chips == 1:
                continue
            groups = coords_of_groups(layout, index)
            if axis.group.spans_whole_axes:
                assert grid_links(slice_, groups) == pytest.approx(axis.group.num_links), axis
            else:
                walks = [walk_round(group) for group in groups]
                found = ring_links(slice_, walks)
                assert found >= axis.group.num_links - 1e-9, axis
                assert found <= 2 * axis.group.num_links, axis


@pytest.mark.parametrize("topology", ["tpu7x:4x4x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x4x4"])
def test_no_mesh_in_a_random_or_in_the_hosts_order_is_better(topology: str) -> None:
    system = System.parse(topology)
    chance = np.random.default_rng(0)
    orders = [RankMap.host_major(system).devices]
    orders += [chance.permutation(system.num_devices) for _ in range(3)]
    table = coordinates(system)
    for mesh in [(system.num_devices // 8, 8), (8, system.num_devices // 8), (4, 4, -1)]:
        shape = np.arange(system.num_devices).reshape(mesh).shape
        ours = weighed(lay_out_mesh(system, shape).costs)
        for order in orders:
            costs = []
            for axis, size in enumerate(shape):
                groups = np.moveaxis(order.reshape(shape), axis, -1).reshape(-1, size)
                rings = [[Coord(*map(int, table[d][1:4])) for d in group] for group in groups]
                costs.append((1 - 1 / size) / ring_links(system.slice, rings))
            assert weighed(costs) >= ours - 1e-9


def test_a_layout_holds_each_device_once_and_its_groups_in_the_compiler_s_order() -> None:
    for topology, mesh in [
        ("tpu7x:4x4x4", (4, 4, 8)),
        ("v5p:4x4x8*2", (4, 8, 8)),
        ("v6e:8x8", (64,)),
    ]:
        system = System.parse(topology)
        layout = lay_out_mesh(system, mesh, names=[f"a{i}" for i in range(len(mesh))])
        devices = layout.devices()
        assert devices.shape == mesh
        assert sorted(devices.reshape(-1).tolist()) == list(range(system.num_devices))
        for axis in range(len(mesh)):
            assert (np.diff(layout.groups(axis), axis=1) > 0).all()
    whole = lay_out_mesh(System.parse("tpu7x:4x4x4"), (128,))
    assert whole.devices().tolist() == list(range(128))


@pytest.mark.parametrize(
    ("mesh", "slices"),
    [((4, 8, 8), [4, 1, 1]), ((8, 32), [4, 1]), ((2, 2, 64), [2, 2, 1]), ((2, 128), [2, 2])],
)
def test_slices_are_laid_on_the_outermost_axes(mesh: tuple[int, ...], slices: list[int]) -> None:
    system = System.parse("v5p:4x4x4*4")
    layout = lay_out_mesh(system, mesh)
    assert [axis.num_slices for axis in layout.axes] == slices
    where = coordinates(system)[:, 0][layout.devices()]
    inner = where.reshape(-1, mesh[-1] // slices[-1])
    assert (inner == inner[:, :1]).all(), "what the innermost axis joins is in one slice"


def test_slices_that_fit_no_outer_axis_are_refused() -> None:
    with pytest.raises(TopologyError, match="cannot be laid on the outermost axes"):
        lay_out_mesh(System.parse("v6e:4x4*3"), (16, 3))
    with pytest.raises(TopologyError, match=r"has 32 places, and v6e:4x4 has 16 devices"):
        lay_out_mesh(System.parse("v6e:4x4"), (4, 8))
    with pytest.raises(ValueError, match="needs 2 different names"):
        lay_out_mesh(System.parse("v6e:4x4"), (4, 4), names=("dp", "dp"))


def test_traffic_decides_who_gets_the_links() -> None:
    system = System.parse("v6e:8x8")
    quiet_inside = lay_out_mesh(system, (8, 8), traffic=(1, 0.01))
    busy_inside = lay_out_mesh(system, (8, 8), traffic=(0.01, 1))
    alike = lay_out_mesh(system, (8, 8), traffic=(1, 1))
    assert quiet_inside.axes[0].group.num_links == 2
    assert busy_inside.axes[1].group.num_links == 2
    assert kinds(alike) == [GroupKind.LINE, GroupKind.LINE]


def test_the_plain_mesh_is_the_layout_where_ranks_come_in_its_order() -> None:
    system = System.parse("tpu7x:4x4x8")
    layout = lay_out_mesh(system, (16, 16))
    ranks = layout.ranks(layout.rank_map())
    assert ranks.tolist() == np.arange(256).reshape(16, 16).tolist()
    on_hosts = layout.ranks(RankMap.host_major(system))
    assert sorted(on_hosts.reshape(-1).tolist()) == list(range(256))


def test_rank_maps_know_hosts_and_local_ranks() -> None:
    system = System.parse("tpu7x:4x4x4*2")
    by_host = RankMap.host_major(system)
    assert by_host.hosts().tolist() == np.repeat(np.arange(32), 8).tolist()
    assert by_host.local_ranks().tolist() == list(range(8)) * 32
    for rank in (0, 9, 200, 255):
        device = by_host.device_of(rank)
        assert by_host.rank_of(device) == rank
        slice_ = system.slice
        host = slice_.host_of(device.coord) + device.slice_index * slice_.num_hosts
        assert host == rank // 8
    row_major = RankMap.row_major(system)
    devices = [row_major.device_of(rank) for rank in range(256)]
    assert RankMap.of_devices(system, devices).devices.tolist() == list(range(256))
    with pytest.raises(TopologyError, match="256 ranks were given, with 255 different devices"):
        RankMap.of_devices(system, [devices[1], *devices[1:]])
