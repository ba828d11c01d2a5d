"""Neighbours, distances and cuts, against a walk over the links."""

from __future__ import annotations

from collections import deque

import pytest

from tpu_dist.topology.coordinates import Coord
from tpu_dist.topology.links import (
    bisection_bandwidth,
    bisection_links,
    diameter,
    hop_distance,
    links_of,
    neighbours,
    num_links_along,
)
from tpu_dist.topology.slice import Slice

SLICES = [
    "v5e:1x1",
    "v5e:2x4",
    "v6e:4x8",
    "v6e:8x16",
    "v6e:16x16",
    "tpu7x:2x2x1",
    "tpu7x:2x2x4",
    "tpu7x:2x4x4",
    "v5p:4x4x4",
    "v5p:4x4x8",
    "v4:4x4x8_twisted",
    "v4:4x8x8_twisted",
    "v4:8x4x4_twisted",
]


def walk(slice_: Slice, start: Coord) -> dict[Coord, int]:
    distances = {start: 0}
    queue = deque([start])
    while queue:
        coord = queue.popleft()
        for other in neighbours(slice_, coord):
            if other not in distances:
                distances[other] = distances[coord] + 1
                queue.append(other)
    return distances


@pytest.mark.parametrize("text", SLICES)
def test_hops_are_those_of_a_walk(text: str) -> None:
    slice_ = Slice.parse(text)
    starts = [coord for coord in slice_.coords() if sum(coord) % 5 == 0][:8]
    farthest = 0
    for start in starts:
        distances = walk(slice_, start)
        assert len(distances) == slice_.num_chips
        for coord, hops in distances.items():
            assert hop_distance(slice_, start, coord) == hops, (start, coord)
        farthest = max(farthest, *distances.values())
    assert farthest <= diameter(slice_)
    assert max(walk(slice_, Coord(0, 0, 0)).values()) == diameter(slice_)


@pytest.mark.parametrize("text", SLICES)
def test_a_link_leads_there_and_back(text: str) -> None:
    slice_ = Slice.parse(text)
    for coord in slice_.coords():
        for link in links_of(slice_, coord):
            back = [one for one in links_of(slice_, link.to) if one.to == coord]
            assert any(one.axis == link.axis for one in back)
            assert link.to in slice_


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("tpu7x:4x4x4", 6),
        ("v4:4x4x8_twisted", 6),
        ("v6e:16x16", 4),
        ("tpu7x:2x2x1", 2),
        ("tpu7x:2x2x2", 3),
        ("v5e:1x1", 0),
    ],
)
def test_every_chip_of_a_torus_has_all_its_links(text: str, links: int) -> None:
    slice_ = Slice.parse(text)
    assert {len(links_of(slice_, coord)) for coord in slice_.coords()} == {links}
    if not slice_.twisted:
        assert sum(num_links_along(slice_, axis) for axis in range(3)) == links


@pytest.mark.parametrize("text", SLICES)
def test_the_bisection_is_the_smallest_cut_across_an_axis(text: str) -> None:
    slice_ = Slice.parse(text)
    cuts = []
    for axis, extent in enumerate(slice_.shape):
        if extent == 1:
            continue
        near = {coord for coord in slice_.coords() if coord[axis] < extent // 2}
        cuts.append(sum(link.to not in near for coord in near for link in links_of(slice_, coord)))
    assert bisection_links(slice_) == min(cuts, default=0)


def test_a_twisted_torus_has_twice_the_bisection() -> None:
    twisted, plain = Slice.parse("v4:4x4x8_twisted"), Slice.parse("v4:4x4x8")
    assert bisection_links(twisted) == 2 * bisection_links(plain) == 64
    assert bisection_bandwidth(plain) == 2 * 32 * 45e9
    assert diameter(twisted) < diameter(plain)
