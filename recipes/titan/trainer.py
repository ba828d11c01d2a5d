"""torchtitan's Trainer, on this process's one device, with its mesh laid on the slice.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.tools.utils import device_type
from torchtitan.train import Trainer

from tpu_dist import init_device_mesh
from tpu_dist.recipes.titan.compatibility import first_local_device


class LaidOutDims(ParallelDims):  # type: ignore[misc]  # torchtitan is untyped
    """Parallel dimensions whose world goes through the slice as `tpu_dist.init_device_mesh` says.

    torchtitan numbers the places of its meshes by rank, the innermost dimension fastest. Here the
    ranks stand in the order that gives each dimension the most links.
    """

    topology: str | None = None

    def build_mesh(self) -> DeviceMesh:
        """Build torchtitan's meshes, on a world in that order. Collective over all ranks."""
        torch_order = parallel_dims.init_device_mesh
        parallel_dims.init_device_mesh = self._lay_out
        try:
            world: DeviceMesh = super().build_mesh()
            return world
        finally:
            parallel_dims.init_device_mesh = torch_order

    def _lay_out(
        self, device: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]
    ) -> DeviceMesh:
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "fsdp": self.dp_shard * self.cp,
            "tp": self.tp,
        }
        laid_out = init_device_mesh(
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            device_type=device,
            topology=self.topology,
        )
        return DeviceMesh(device, laid_out.mesh.view(mesh_shape), mesh_dim_names=mesh_dim_names)


class DeviceTrainer(Trainer):  # type: ignore[misc]  # torchtitan is untyped
    """torchtitan's Trainer for the device that `compatibility.prepare` was told.

    Args:
        job_config: what to train.
        topology: the slice or slices, as `tpu_dist.init_device_mesh` takes it; on a TPU it is
            measured, and need not be given.
    """

    def __init__(self, job_config: JobConfig, *, topology: str | None = None) -> None:
        self._topology = topology
        with first_local_device() as self._restore_local_rank:
            super().__init__(job_config)

    def init_distributed(self) -> Any:
        """Start the process group; return the parallel dimensions, yet without meshes."""
        self._restore_local_rank()
        if device_type == "cpu":
            # For "tpu" too: barrier(device_ids=...) takes the accelerator that torch knows of.
            dist.Backend.default_device_backend_map["cpu"] = "cpu:gloo,tpu:gloo"
        dims = super().init_distributed()
        if device_type != "tpu":
            return dims
        degrees = {f.name: getattr(dims, f.name) for f in dataclasses.fields(dims) if f.repr}
        laid_out = LaidOutDims(**{k: v for k, v in degrees.items() if not k.startswith("_")})
        laid_out.topology = self._topology
        return laid_out
