"""The DeviceMesh adapter: a mesh whose axes stand where the slice has the most links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpu_dist._autoload import BACKEND
from tpu_dist.errors import BringUpError, TopologyError
from tpu_dist.runtime.runtime import Runtime, current_runtime
from tpu_dist.topology.measured import ReportedDevice, measure
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System


def create_device_mesh(
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None,
    device_type: str | None,
    topology: str | None,
    traffic: Sequence[float] | None,
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
    rank_map = _rank_map(runtime, topology)
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
    return DeviceMesh(device_type or _tensors_device(), ranks, mesh_dim_names=names)


def _rank_map(runtime: Runtime, topology: str | None) -> RankMap | None:
    """Return what rank drives which device, or None where devices have no place: on the CPU."""
    measured = None
    if runtime.platform == "tpu":
        measured = measure([_report(device) for device in runtime.devices])
    if topology is None:
        return measured
    system = System.parse(topology)
    if measured is not None:
        _check_same(system, measured.system)
        return RankMap(system=system, devices=measured.devices)
    if system.num_devices != runtime.world_size:
        raise TopologyError(
            f"topology={topology!r} has {system.num_devices} devices, and there are "
            f"{runtime.world_size} ranks. Start as many, or name another topology."
        )
    return RankMap.row_major(system)


def _check_same(asked: System, found: System) -> None:
    one, other = asked.slice, found.slice
    if (one.generation, one.shape, asked.num_slices) != (
        other.generation,
        other.shape,
        found.num_slices,
    ):
        raise TopologyError(
            f"topology={str(asked)!r} was given, and the job runs on {found}. Leave it out."
        )


def _report(device: Any) -> ReportedDevice:
    return ReportedDevice(
        kind=device.device_kind,
        slice_index=getattr(device, "slice_index", 0),
        coords=tuple(device.coords),
        core=device.core_on_chip,
    )


def _tensors_device() -> str:
    """Return where tensors live: torch.device("tpu") once it is registered, else the CPU."""
    registered: str = torch._C._get_privateuse1_backend_name()
    return "tpu" if registered == "tpu" else "cpu"
