"""Ranks for the processes of hosts: with them the plain mesh is the one that was laid out."""

from __future__ import annotations

import numpy as np
import pytest

from tpu_dist.errors import TopologyError
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.rank_assignment import assign_ranks
from tpu_dist.topology.rank_map import RankMap, host_places
from tpu_dist.topology.system import System

CASES = [
    ("v6e:2x2", (2, 2)),
    ("tpu7x:4x4x4", (16, 8)),
    ("tpu7x:4x4x4", (4, 4, 8)),
    ("v5p:2x2x4*2", (2, 4, 4)),
    ("v5e:4x8", (32,)),
]


@pytest.mark.parametrize(("topology", "mesh"), CASES)
def test_the_plain_mesh_of_these_ranks_is_the_layout(topology: str, mesh: tuple[int, ...]) -> None:
    system = System.parse(topology)
    table = assign_ranks(system, mesh)
    assert np.array_equal(np.sort(table, axis=None), np.arange(system.num_devices))
    # The device of each rank, as the hosts' processes have them.
    hosts, locals_ = host_places(system)
    device_of = np.argsort(table[hosts, locals_])
    plain = np.arange(system.num_devices).reshape(mesh)
    assert np.array_equal(device_of[plain], lay_out_mesh(system, mesh).devices())


@pytest.mark.parametrize("topology", ["v6e:4x4", "tpu7x:2x2x4*2"])
def test_without_a_mesh_ranks_are_row_major(topology: str) -> None:
    system = System.parse(topology)
    order = RankMap.host_major(system).devices
    assert np.array_equal(assign_ranks(system).reshape(-1), order)


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"a mesh of \(3, 3\) has 9 places"):
        assign_ranks(System.parse("v6e:2x2"), (3, 3))
