"""Where the ranks of a job stand in the slices that they run on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.measured import ReportedDevice, measure
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System

_logger = logging.getLogger(__name__)


def job_rank_map(
    platform: str, devices: Sequence[Any], topology: str | None = None
) -> RankMap | None:
    """Return which device of the system each rank drives, or None where devices have no place.

    Args:
        platform: ``tpu``: the devices say where they are; ``cpu``: they are nowhere.
        devices: every rank's, by rank.
        topology: the system by name; on the CPU stand-in the ranks stand for its devices,
            row-major.

    Raises:
        TopologyError: the devices are no slices, or others than `topology` says.
    """
    if platform == "tpu":
        measured = measure([_report(device) for device in devices])
        if topology is None:
            return measured
        system = System.parse(topology)
        _check_same(system, measured.system)
        return RankMap(system=system, devices=measured.devices)
    return None if topology is None else stand_in_rank_map(topology, len(devices))


def stand_in_rank_map(topology: str, num_ranks: int) -> RankMap:
    """Return the map of ranks that stand for the devices of a system, row-major.

    Raises:
        TopologyError: there is no such system, or it has another number of devices.
    """
    system = System.parse(topology)
    if system.num_devices != num_ranks:
        raise TopologyError(
            f"topology={topology!r} has {system.num_devices} devices, and there are "
            f"{num_ranks} ranks. Start as many, or name another topology."
        )
    return RankMap.row_major(system)


def find_rank_map(platform: str, devices: Sequence[Any], topology: str | None) -> RankMap | None:
    """Return the same, and None too where the devices of a TPU job make up no slice that is known.

    Collectives need it to be fast, and not to be right.
    """
    try:
        return job_rank_map(platform, devices, topology)
    except TopologyError as error:
        if topology is not None:
            raise
        _logger.warning("collectives are not tuned for this job's slice: %s", error)
        return None


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
