"""The DeviceMesh adapter: a mesh whose axes stand where the slice has the most links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpu_dist._autoload import BACKEND
from tpu_dist._process_group import ProcessGroup
from tpu_dist.collectives.siblings import Siblings
from tpu_dist.errors import BringUpError, TopologyError
from tpu_dist.runtime.job_topology import job_rank_map
from tpu_dist.runtime.runtime import Runtime, current_runtime
from tpu_dist.topology.mesh_search import lay_out_mesh


def create_device_mesh(
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None,
    device_type: str | None,
    topology: str | None,
    traffic: Sequence[float] | None,
    lockstep: bool,
) -> DeviceMesh:
    """Do what `tpu_dist.init_device_mesh` says. Collective over all ranks."""
    shape = tuple(mesh_shape)
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    runtime = current_runtime()
    if runtime is None:
        raise BringUpError(
            f"init_device_mesh needs a default group on {BACKEND!r}, which knows the slice; the "
            f"default group is on {dist.get_backend()!r}. Call init_process_group({BACKEND!r}) "
            f"first, or use torch.distributed.init_device_mesh."
        )
    asked = topology or runtime.topology
    rank_map = job_rank_map(runtime.platform, runtime.devices, asked)
    if rank_map is None:
        if math.prod(shape) != runtime.world_size:
            raise TopologyError(
                f"a mesh of {shape} has {math.prod(shape)} places, and there are "
                f"{runtime.world_size} ranks. Give sizes whose product is {runtime.world_size}."
            )
        ranks = torch.arange(runtime.world_size, dtype=torch.int).view(shape)
    else:
        layout = lay_out_mesh(rank_map.system, shape, names=mesh_dim_names, traffic=traffic)
        ranks = torch.from_numpy(layout.ranks(rank_map)).to(torch.int)
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    mesh = DeviceMesh(device_type or _tensors_device(), ranks, mesh_dim_names=names)
    if lockstep:
        _join_siblings(mesh, runtime)
    return mesh


_numbers = itertools.count()  # of meshes in lockstep: they are made in one order on all ranks


def _join_siblings(mesh: DeviceMesh, runtime: Runtime) -> None:
    """Have the groups of each axis run as one program."""
    number = next(_numbers)
    for axis, size in enumerate(mesh.mesh.shape):
        if size in (1, runtime.world_size):
            continue
        groups = mesh.mesh.movedim(axis, -1).reshape(-1, size).tolist()
        group = mesh.get_group(axis)
        assert isinstance(group, ProcessGroup)
        group.call_with_siblings(Siblings(runtime, groups, f"lockstep/{number}/{axis}"))


def _tensors_device() -> str:
    """Return where tensors live: torch.device("tpu") once it is registered, else the CPU."""
    registered: str = torch._C._get_privateuse1_backend_name()
    return "tpu" if registered == "tpu" else "cpu"
