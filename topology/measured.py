"""From the devices that a client reports to the system they make up, and the rank of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpu_dist.topology.coordinates import Coord, Device, Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import find_generation
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedDevice:
    """A device as PJRT reports it.

    Attributes:
        kind: as in ``TPU v5 lite``.
        slice_index: which slice it is in.
        coords: of its chip.
        core: which of the chip's devices it is.
    """

    kind: str
    slice_index: int
    coords: tuple[int, ...]
    core: int


def measure(devices: Sequence[ReportedDevice]) -> RankMap:
    """Return the system that the devices make up, and which device each rank has.

    Coordinates may begin anywhere: a slice of a pod keeps those of the pod.

    Args:
        devices: by rank.

    Raises:
        TopologyError: they are not one block of chips a slice, alike in all slices.

    Example:
        >>> one = ReportedDevice(kind="TPU v6 lite", slice_index=0, coords=(0, 0, 0), core=0)
        >>> str(measure([one]).system)
        'v6e:1x1'
    """
    kinds = {device.kind for device in devices}
    if len(kinds) != 1:
        raise TopologyError(f"the devices of a job must be of one kind, and are {sorted(kinds)}.")
    generation = find_generation(kinds.pop())
    slices = sorted({device.slice_index for device in devices})
    origins, shapes = {}, set()
    for index in slices:
        axes = list(zip(*(d.coords for d in devices if d.slice_index == index), strict=True))
        origins[index] = tuple(min(axis) for axis in axes)
        shapes.add(tuple(max(axis) - min(axis) + 1 for axis in axes))
    if len(shapes) != 1:
        raise TopologyError(
            f"the slices of a job must have one shape, and have "
            f"{', '.join('x'.join(map(str, shape)) for shape in sorted(shapes))}."
        )
    system = System(
        slice=Slice.with_usual_links(generation, Shape(*shapes.pop())), num_slices=len(slices)
    )
    placed = [
        Device(
            slices.index(device.slice_index),
            Coord(
                *(at - o for at, o in zip(device.coords, origins[device.slice_index], strict=True))
            ),
            device.core,
        )
        for device in devices
    ]
    return RankMap.of_devices(system, placed)
