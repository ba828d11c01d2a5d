"""Where the ranks of a group stand, and in which order a program takes them."""

from __future__ import annotations

import pytest

from tpu_dist.topology.groups import Digit
from tpu_dist.topology.placement import Extent, place_group
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System


@pytest.mark.parametrize(
    ("topology", "ranks", "extent", "num_slices"),
    [
        ("v6e:4x4", range(16), Extent.SLICE, 1),
        ("v6e:4x4", [0, 4, 8, 12], Extent.BLOCK, 1),
        ("v6e:4x4", [0, 2, 8, 10], Extent.BLOCK, 1),
        ("v6e:4x4", [3], Extent.BLOCK, 1),
        ("v6e:4x4", [0, 1, 4], Extent.SUBSET, 1),
        ("v6e:4x4", [0, 1, 3], Extent.SUBSET, 1),
        ("v6e:4x4*2", range(32), Extent.SLICES, 2),
        ("v6e:4x4*2", range(16, 32), Extent.SLICE, 1),
        ("v6e:4x4*4", [5, 37], Extent.SLICES, 2),
        ("v6e:4x4*2", [0, 1, 16], Extent.SCATTERED, 2),
        ("v6e:4x4*2", [0, 1, 4, 16, 17, 20], Extent.SCATTERED, 2),
    ],
)
def test_what_of_the_system_a_group_is(
    topology: str, ranks: range | list[int], extent: Extent, num_slices: int
) -> None:
    placement = place_group(RankMap.row_major(System.parse(topology)), ranks)
    assert (placement.extent, placement.num_slices) == (extent, num_slices)
    assert placement.num_members == len(ranks)


def test_the_program_s_order_is_that_of_the_coordinates_whatever_the_ranks() -> None:
    rank_map = RankMap.host_major(System.parse("v5p:2x2x2"))  # devices 0, 4, 2, 6, 1, 5, 3, 7
    placement = place_group(rank_map, [7, 0, 1, 2])
    assert placement.order == (1, 3, 2, 0)
    assert place_group(rank_map, range(8)).order == (0, 4, 2, 6, 1, 5, 3, 7)


def test_the_devices_of_chips_are_a_digit_of_their_own() -> None:
    rank_map = RankMap.row_major(System.parse("tpu7x:2x2x1"))
    placement = place_group(rank_map, [0, 1, 4, 5])
    assert placement.group is not None
    assert placement.group.digits == (Digit(axis=0, size=2), Digit(axis=3, size=2))


@pytest.mark.parametrize(
    ("topology", "ranks", "can"),
    [
        ("v5e:4x4", range(16), True),
        ("v5e:4x4", range(4), False),
        ("v5e:4x4", [3], True),
        ("v5e:2x4", range(4), True),
        ("v6e:4x4*2", range(32), True),
        ("v6e:4x4*2", range(16, 32), True),
        ("v6e:4x4*2", [0, 16], False),
        ("v5p:4x4x4", range(4), True),
    ],
)
def test_where_a_program_must_span_the_slice_its_parts_have_none(
    topology: str, ranks: range | list[int], can: bool
) -> None:
    placement = place_group(RankMap.row_major(System.parse(topology)), ranks)
    assert placement.can_run_programs is can
