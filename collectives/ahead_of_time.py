"""Compiles collectives for a slice that is not here: libtpu's compiler runs on any machine.

To be used in a process of its own: some options end the compiler, and libtpu is loaded once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_dist.collectives.tuned_forms import LANES, TILE_ROWS, TunedForm
from tpu_dist.topology.coordinates import Coord, Device
from tpu_dist.topology.errors import TopologyError, UnsupportedError
from tpu_dist.topology.mesh_layout import MeshLayout
from tpu_dist.topology.rank_map import Numbers
from tpu_dist.topology.system import System

DTYPE = "float32"  # of payloads
ITEM_BYTES = 4

# What must be set before libtpu is loaded: it would ask for a TPU VM's metadata, and take a lock.
COMPILER_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """What the compiler made of a collective.

    Attributes:
        text: the optimised HLO.
        num_bytes: of the payload: the gathered, the reduced, or the one to be scattered.
        temp_bytes: of one device, beside arguments and result.
        seconds: that the compile took.
    """

    text: str
    num_bytes: int
    temp_bytes: int
    seconds: float


class Compiler:
    """The ahead-of-time compiler for one system.

    Attributes:
        devices: libtpu's device for each device's number.
    """

    def __init__(self, system: System) -> None:
        """Describe the system to libtpu.

        Raises:
            UnsupportedError: a twisted torus, slices that are not joined, or a libtpu that
                describes such chips differently.
            TopologyError: libtpu has no such slice, or is not installed.
        """
        if system.slice.twisted:
            raise UnsupportedError(
                f"{system} cannot be planned for: the model of links knows no twisted torus. Plan "
                f"for the same shape untwisted."
            )
        if system.num_slices > 1 and system.slice.generation.dcn_bandwidth is None:
            raise UnsupportedError(
                f"{system} cannot be planned for: {system.slice.generation} slices are not joined "
                f"over DCN. Plan for one."
            )
        self.system = system
        self.devices = _describe(system)

    def compile(self, form: TunedForm, devices: Numbers, num_bytes: int) -> CompiledProgram:
        """Compile a form.

        Args:
            form: of the collective.
            devices: the number of the device at each place: [groups, members], members in the
                order of the form's digits.
            num_bytes: of the payload, rounded up to whole tiles for each member.
        """
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(self.devices[devices].reshape(-1, *form.sizes), ("groups", *form.names))
        members = form.num_members
        count = num_elements(num_bytes, members)
        local = count // members if form.verb == "all_gather" else count
        spec = PartitionSpec(("groups", *form.names))
        payload = jax.ShapeDtypeStruct(
            (local * devices.size,), DTYPE, sharding=NamedSharding(mesh, spec)
        )
        function: Callable[[Any], Any] = jax.shard_map(
            form.function(), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        start = time.perf_counter()
        compiled = (
            jax.jit(function)
            .lower(payload)
            .compile(compiler_options=dict(form.options) if form.options else None)
        )
        memory: Any = compiled.memory_analysis()
        return CompiledProgram(
            text=compiled.as_text() or "",
            num_bytes=count * ITEM_BYTES,
            temp_bytes=int(memory.temp_size_in_bytes),
            seconds=time.perf_counter() - start,
        )


def num_elements(num_bytes: int, members: int) -> int:
    """Return the elements of a payload, rounded up to whole tiles for each member of a group."""
    grain = members * TILE_ROWS * LANES
    return math.ceil(num_bytes / ITEM_BYTES / grain) * grain


def tuned_places(layout: MeshLayout, axis: int) -> Numbers:
    """Return the devices of each group of a mesh axis as laid out: [groups, members]."""
    return layout.groups(axis)


def naive_places(system: System, mesh_shape: tuple[int, ...], axis: int) -> Numbers:
    """Return the same where rank i, in the hosts' order, is at place i of the mesh."""
    from tpu_dist.topology.rank_map import RankMap

    order = RankMap.host_major(system).devices.reshape(mesh_shape)
    return np.moveaxis(order, axis, -1).reshape(-1, mesh_shape[axis])


def _describe(system: System) -> np.ndarray[Any, Any]:
    """Return libtpu's device for each device's number."""
    from jax.experimental import topologies

    slice_ = system.slice
    try:
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=str(slice_),
            wrap=slice_.wrap,
            num_slices=system.num_slices,
        )
    except Exception as error:  # the edge to libtpu: it raises XlaRuntimeError, OSError and others
        raise TopologyError(
            f"libtpu cannot describe {system}: {error}. Look whether libtpu is installed (pip "
            f"install 'tpu-dist[tpu]') and knows the shape."
        ) from error
    found = np.empty(system.num_devices, object)
    if len(description.devices) != found.size:
        raise UnsupportedError(
            f"libtpu describes {system} with {len(description.devices)} devices, and a program on "
            f"it sees {found.size}: what {slice_.generation}'s chips do as one device cannot be "
            f"compiled ahead of time."
        )
    device: Any
    for device in description.devices:
        index = getattr(device, "slice_index", None) or 0
        place = Device(index, Coord(*device.coords), device.core_on_chip)
        found[system.rank_of(place)] = device
    return found
