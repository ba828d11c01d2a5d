"""tpu_dist.init_device_mesh on real ranks: the mesh that is laid out, and collectives on it."""

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

import tpu_dist


def laid_out(
    rank: int, topology: str | None, shape: tuple[int, ...]
) -> tuple[list[int], list[float]]:
    """Return the mesh, and the sums of all ranks' numbers along each axis."""
    names = ("dp", "tp")[-len(shape) :]
    mesh = tpu_dist.init_device_mesh(shape, mesh_dim_names=names, topology=topology)
    assert mesh.mesh_dim_names == names
    assert mesh.device_type == "tpu"
    sums = []
    for name in names:
        number = torch.tensor([float(10**rank)])
        dist.all_reduce(number, group=mesh.get_group(name))
        sums.append(number.item())
    return mesh.mesh.tolist(), sums


def test_a_mesh_is_laid_on_the_topology() -> None:
    """Rows are the 2x2 blocks of chips that a ring can walk, and not rows of chips."""
    with RankPool(8) as pool:
        for mesh, _ in pool(laid_out, "v6e:2x4", (2, 4)):
            assert mesh == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_groups_are_those_of_the_mesh(pool4: RankPool) -> None:
    results = pool4(laid_out, "v6e:2x2", (2, 2))
    for rank, (mesh, (along_dp, along_tp)) in enumerate(results):
        row = next(row for row in mesh if rank in row)
        column = [other[row.index(rank)] for other in mesh]
        assert along_tp == sum(10**member for member in row)
        assert along_dp == sum(10**member for member in column)


def test_without_a_topology_the_stand_in_has_torch_s_order(pool4: RankPool) -> None:
    for mesh, _ in pool4(laid_out, None, (2, 2)):
        assert mesh == [[0, 1], [2, 3]]


def refused(rank: int, topology: str | None, shape: tuple[int, ...]) -> str:
    with pytest.raises(tpu_dist.TopologyError) as caught:
        tpu_dist.init_device_mesh(shape, topology=topology)
    return str(caught.value)


def test_what_does_not_fit_is_refused_on_every_rank(pool4: RankPool) -> None:
    for said in pool4(refused, "v5p:2x2x2", (2, 4)):
        assert "topology='v5p:2x2x2' has 8 devices, and there are 4 ranks" in said
    for said in pool4(refused, "v6e:2x2", (2, 4)):
        assert "a mesh of (2, 4) has 8 places, and v6e:2x2 has 4 devices" in said
    for said in pool4(refused, None, (3, 2)):
        assert "a mesh of (3, 2) has 6 places, and there are 4 ranks" in said
