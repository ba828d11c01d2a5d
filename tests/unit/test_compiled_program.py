"""Programs that libtpu 0.0.42 compiled, read and estimated; the texts are in programs/."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tpu_dist.collectives.ahead_of_time import naive_places, num_elements, tuned_places
from tpu_dist.collectives.compiled_program import CompiledCollective, read_program
from tpu_dist.collectives.ici_model import Estimate, estimate, ideal_seconds
from tpu_dist.topology.errors import TpuDistError
from tpu_dist.topology.groups import Digit
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.placement import group_of
from tpu_dist.topology.rank_map import coordinates
from tpu_dist.topology.system import System

PROGRAMS = Path(__file__).parent / "programs"
PAYLOAD = 64 << 20


def program(name: str) -> tuple[CompiledCollective, ...]:
    return read_program((PROGRAMS / f"{name}.txt").read_text())


@pytest.mark.parametrize(
    ("name", "kinds", "colours", "phases"),
    [
        ("tpu7x_4x4x4_all_gather", ["all-gather"], 6, 3),
        ("tpu7x_4x4x4_all_gather_naive", ["all-reduce"], 12, 3),
        ("tpu7x_4x4x4_reduce_scatter", ["reduce-scatter"], 6, 3),
        ("tpu7x_4x4x4_tp_all_reduce", ["all-reduce"], 2, 1),
        ("tpu7x_4x4x4_tp_naive_all_reduce", ["all-reduce"], 2, 1),
        ("v5p_4x4x4_all_reduce_naive", ["all-reduce"], 6, 3),
        ("v5e_4x4_reduce_scatter", ["reduce-scatter", "collective-permute"], 2, 1),
        ("v5e_4x4_all_gather", ["all-gather"], 2, 1),
        ("v5e_16x16_reduce_scatter", ["reduce-scatter"], 4, 2),
        ("v6e_4x4_reduce_scatter_naive", ["all-reduce"], 4, 2),
    ],
)
def test_the_algorithm_is_read(name: str, kinds: list[str], colours: int, phases: int) -> None:
    collectives = program(name)
    assert [each.kind for each in collectives] == kinds
    assert (collectives[0].colours, collectives[0].phases) == (colours, phases)
    assert collectives[0].algorithm != "not named"


def test_a_phase_within_a_chip_is_no_phase_over_ici() -> None:
    (scatter,) = program("tpu7x_4x4x4_reduce_scatter")
    assert scatter.algorithm == "sparsecore D2D/X_TORUS/Y_TORUS/Z_TORUS"
    assert scatter.phases == 3
    assert scatter.result_bytes == PAYLOAD // 128


def test_what_crosses_from_slice_to_slice_is_read_and_counted() -> None:
    collectives = program("tpu7x_2x2x2_2_slices_all_reduce")
    assert sorted(each.kind for each in collectives) == [
        "all-gather",
        "all-reduce",
        "reduce-scatter",
    ]
    (between,) = (each for each in collectives if each.num_slices > 1)
    assert (between.kind, between.num_slices) == ("all-reduce", 2)
    assert between.result_bytes == PAYLOAD // 16  # a device's piece of its slice
    system = System.parse("tpu7x:2x2x2*2")
    found = estimate(system, np.arange(32), collectives)
    group = lay_out_mesh(system, (32,)).axes[0].group
    within = ideal_seconds(group, "all_reduce", PAYLOAD)
    # Half of a piece twice, at half of a chip's 12.5 GB/s.
    over_dcn = PAYLOAD / 16 / 6.25e9
    assert found.seconds == pytest.approx(within + over_dcn, rel=1e-3)
    both = ideal_seconds(group, "all_reduce", PAYLOAD, num_slices=2)
    assert both == pytest.approx(within + over_dcn)


@pytest.mark.parametrize(
    ("target", "num_slices"),
    [
        ('"{1,2}x{0:15}"', 2),
        ('"{0:3}x{0:15}"', 4),
        ("{{100000,100001,200000,200001},{100002,200002}}", 2),
    ],
)
def test_slices_are_counted_as_the_compiler_names_them(target: str, num_slices: int) -> None:
    line = (
        "%recv = (f32[64,128]{1,0:T(8,128)}, u32[], token[]) recv(%after-all), "
        f"frontend_attributes={{_xla_megascale_target={target},"
        '_xla_megascale_transfer_type="ALL_TO_ALL"}'
    )
    (found,) = read_program(line)
    assert (found.kind, found.num_slices) == ("all-to-all", num_slices)
    assert found.result_bytes == 64 * 128 * 4


def test_what_a_slice_receives_to_scatter_is_its_part() -> None:
    collectives = program("tpu7x_2x2x2_2_slices_reduce_scatter")
    (between,) = (each for each in collectives if each.num_slices > 1)
    assert between.kind == "reduce-scatter"
    assert between.result_bytes == PAYLOAD // 32


def test_an_all_reduce_and_slice_that_are_done_as_one_are_a_reduce_scatter() -> None:
    scatter, permute = program("v5e_4x4_reduce_scatter")
    assert scatter.algorithm == "SingleInputAllReduceScatterFusion/StrategyRing"
    assert scatter.groups == (tuple(range(16)),)
    assert scatter.result_bytes == 8256 * 128 * 4  # a piece, padded to thirds of tiles
    assert permute.groups[:2] == ((0, 1), (1, 2))
    assert permute.result_bytes == 960 * 128 * 4


def estimated(
    name: str, topology: str, mesh: tuple[int, ...], axis: int, *, naive: bool
) -> Estimate:
    system = System.parse(topology)
    layout = lay_out_mesh(system, mesh)
    places = naive_places(system, mesh, axis) if naive else tuned_places(layout, axis)
    return estimate(system, places.reshape(-1), program(name))


@pytest.mark.parametrize(
    ("name", "topology", "naive", "links", "microseconds"),
    [
        ("tpu7x_4x4x4_all_gather", "tpu7x:4x4x4", False, 6, 110),
        ("tpu7x_4x4x4_all_gather_naive", "tpu7x:4x4x4", True, 6, 220),
        ("tpu7x_4x4x4_reduce_scatter", "tpu7x:4x4x4", False, 6, 110),
        ("v5p_4x4x4_all_reduce_naive", "v5p:4x4x4", True, 6, 245),
        ("v5e_4x4_all_gather", "v5e:4x4", False, 2, 699),
        ("v5e_4x4_reduce_scatter", "v5e:4x4", False, 2, 715),
        ("v5e_16x16_reduce_scatter", "v5e:16x16", False, 4, 371),
        ("v6e_4x4_reduce_scatter_naive", "v6e:4x4", True, 2, 699),
    ],
)
def test_a_whole_slice_takes_its_time(
    name: str, topology: str, naive: bool, links: float, microseconds: float
) -> None:
    mesh = (System.parse(topology).num_devices,)
    found = estimated(name, topology, mesh, 0, naive=naive)
    assert found.links == links
    assert found.seconds * 1e6 == pytest.approx(microseconds, rel=0.005)


def test_an_axis_uses_the_links_that_its_groups_have() -> None:
    tuned = estimated("tpu7x_4x4x4_tp_all_reduce", "tpu7x:4x4x4", (16, 8), 1, naive=False)
    naive = estimated("tpu7x_4x4x4_tp_naive_all_reduce", "tpu7x:4x4x4", (16, 8), 1, naive=True)
    assert tuned.links == naive.links == 2  # a ring along z; the four chips of a host
    assert tuned.seconds == pytest.approx(2 * PAYLOAD * 3 / 4 / 2 / 100e9)
    axis = lay_out_mesh(System.parse("tpu7x:4x4x4"), (16, 8)).axes[1]
    assert ideal_seconds(axis.group, "all_reduce", PAYLOAD) == pytest.approx(tuned.seconds)


def test_groups_that_share_links_get_a_part_of_them() -> None:
    system = System.parse("v5p:4x4x4")
    table = coordinates(system)
    every_second = CompiledCollective(
        kind="all-gather",
        result_bytes=PAYLOAD,
        groups=((0, 8), (4, 12)),  # y = 0 and 2, y = 1 and 3
        algorithm="",
        colours=2,
        phases=1,
    )
    found = group_of(system.slice, table[[0, 8]])
    assert found is not None and found.digits == (Digit(axis=1, size=2, stride=2),)
    assert estimate(system, np.arange(64), [every_second]).links == 0.5
    assert group_of(system.slice, table[[0, 4, 12]]) is None
    assert group_of(system.slice, table[[0, 5]]) is None


def test_groups_are_read_in_each_of_the_ways_they_are_written() -> None:
    line = "  %a = f32[8,128]{1,0} all-gather(%b), channel_id=1, replica_groups=GROUPS, x={0}"
    for written, groups in {
        "{{0,1},{2,3}}": ((0, 1), (2, 3)),
        "{}": (),
        "[2,2]<=[4]": ((0, 1), (2, 3)),
        "[2,2]<=[2,2]T(1,0)": ((0, 2), (1, 3)),
        "[4,2]<=[2,2,2]T(2,0,1)": ((0, 2), (4, 6), (1, 3), (5, 7)),
    }.items():
        (found,) = read_program(line.replace("GROUPS", written))
        assert found.groups == groups, written
        assert found.result_bytes == 8 * 128 * 4
        assert (found.algorithm, found.colours, found.phases) == ("not named", 1, 1)


def test_what_another_compiler_writes_is_an_error_or_nothing() -> None:
    assert read_program("") == ()
    assert read_program("ENTRY main { all-gather is a word }\n\x00") == ()
    with pytest.raises(TpuDistError, match="cannot be read: .*another compiler"):
        read_program("  %a = f32[8] all-gather(%b), backend_config={not json}")
    with pytest.raises(TpuDistError, match="no known shape"):
        read_program("  %a = token[] all-reduce(%b)")


def test_payloads_are_rounded_up_to_whole_tiles() -> None:
    assert num_elements(PAYLOAD, 128) == PAYLOAD // 4
    assert num_elements(1, 128) == 128 * 8 * 128
    count = num_elements(PAYLOAD, 18432)
    assert count % (18432 * 1024) == 0 and count * 4 >= PAYLOAD
    assert math.isclose(count * 4 / PAYLOAD, 72 / 64)
