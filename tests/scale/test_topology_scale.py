"""Topology and plans of the largest systems there are, in the time of an interactive command.

The bound is half a second of CPU time, three times of what the slowest needs on a slow machine: it
tells a formula from a search that grows with the pod, not a fast machine from a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tpu_dist.topology.coordinates import Coord
from tpu_dist.topology.links import bisection_links, diameter, hop_distance, links_of
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System

BOUND = 0.5  # s
WHOLE_PODS = ["tpu7x:16x24x24", "tpu7x:16x16x32", "v5p:16x20x28", "v6e:16x16"]
SYSTEMS = [*WHOLE_PODS, "tpu7x:16x24x24*16", "v6e:16x16*16", "v5p:8x8x16*16"]


@contextmanager
def within_bound() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < BOUND


@pytest.mark.parametrize("topology", SYSTEMS)
def test_ranks_of_every_device_hosts_and_local_ranks(topology: str) -> None:
    with within_bound():
        system = System.parse(topology)
        order = RankMap.host_major(system)
        hosts, locals_, ranks = order.hosts(), order.local_ranks(), order.ranks()
    assert hosts[-1] == system.num_hosts - 1
    assert ranks[order.devices[1234 % system.num_devices]] == 1234 % system.num_devices
    per_host = system.slice.devices_per_host
    assert np.array_equal(hosts, np.arange(system.num_devices) // per_host)
    assert np.array_equal(locals_, np.arange(system.num_devices) % per_host)


@pytest.mark.parametrize("topology", WHOLE_PODS)
def test_coordinates_neighbours_and_distances_of_every_chip(topology: str) -> None:
    with within_bound():
        slice_ = System.parse(topology).slice
        links = [len(links_of(slice_, coord)) for coord in slice_.coords()]
        farthest = max(hop_distance(slice_, Coord(0, 0, 0), coord) for coord in slice_.coords())
        cut = bisection_links(slice_)
    assert set(links) == {2 * slice_.generation.num_axes}
    assert farthest == diameter(slice_)
    assert cut > 0


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("tpu7x:16x16x32", (128, 16, 8)),
        ("tpu7x:16x24x24", (64, 36, 8)),
        ("tpu7x:16x24x24", (2, 64, 18, 8)),
        ("tpu7x:16x24x24", (2, 3, 16, 24, 8)),
        ("tpu7x:16x24x24*16", (16, 64, 36, 8)),
        ("v5p:16x20x28", (28, 40, 8)),
        ("v6e:16x16*16", (16, 32, 8)),
    ],
)
def test_a_mesh_is_laid_out(topology: str, mesh: tuple[int, ...]) -> None:
    with within_bound():
        layout = lay_out_mesh(System.parse(topology), mesh)
        devices = layout.devices()
        layout.ranks(RankMap.host_major(layout.system))
    assert devices.shape == mesh
    assert np.array_equal(np.sort(devices, axis=None), np.arange(devices.size))
