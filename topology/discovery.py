"""Finds out what slice this host is in, and where: from arguments, environment, servers and bus.

The sources are asked in that order, each for what it knows. What two of them say differently is an
error that names both, and so is what cannot be together: hosts of another slice, or the shape of a
single host in a job of several.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpu_dist.topology.claims import Claim, Description, combine
from tpu_dist.topology.coordinates import HostId
from tpu_dist.topology.placing import find_host, find_num_slices, find_slice, find_slice_index
from tpu_dist.topology.source_environment import SKIP_METADATA, describe_environment
from tpu_dist.topology.source_hardware import describe_hardware
from tpu_dist.topology.source_kubernetes import describe_kubernetes
from tpu_dist.topology.source_metadata import MetadataServer, describe_metadata
from tpu_dist.topology.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this host stands.

    Attributes:
        system: the slice, or slices, of the job.
        slice_index: which of the slices this host is in.
        host: its index in the slice.
        hostnames: of the slice's hosts, by index; empty where nobody said, as for a host alone.
        coordinator: host, or host:port, that joins several slices; None where nobody said.
        origins: where each fact was found, by its name in `claims.Description`.
    """

    system: System
    slice_index: int = 0
    host: HostId = HostId(0)
    hostnames: tuple[str, ...] = ()
    coordinator: str | None = None
    origins: Mapping[str, str]


def describe_arguments(
    topology: str | None = None,
    *,
    host: int | None = None,
    hostnames: Sequence[str] = (),
    slice_index: int | None = None,
    chips_per_host: int | None = None,
) -> Description:
    """Return what the caller says: a topology as in ``v5p:4x4x4*2``, and this host's place in it.

    Raises:
        TopologyError: there is no such topology.
    """
    if topology is None:
        system = None
    else:
        system = System.parse(topology, chips_per_host=chips_per_host)
    origin = f"the argument topology={topology!r}"
    return Description(
        generation=Claim(system.slice.generation, origin) if system else None,
        shape=Claim(system.slice.shape, origin) if system else None,
        twisted=Claim(system.slice.twisted, origin) if system else None,
        num_slices=Claim(system.num_slices, origin) if system else None,
        chips_per_host=_given("chips_per_host", chips_per_host),
        host=_given("host", host),
        hostnames=Claim(tuple(hostnames), "the argument hostnames") if hostnames else None,
        slice_index=_given("slice_index", slice_index),
    )


def discover(
    environ: Mapping[str, str],
    *,
    arguments: Description | None = None,
    root: Path = Path("/"),
    metadata: MetadataServer | None = None,
    own_name: str | None = None,
) -> Place:
    """Find out where this host stands. Blocking for as long as the metadata server may take.

    Args:
        environ: the environment; ``TPU_SKIP_MDS_QUERY=1`` in it leaves the metadata server out.
        arguments: what `describe_arguments` returned.
        root: where sysfs and /dev are.
        metadata: the server to ask; default: the one that the environment names, or Google's.
        own_name: this host's name, to be found among the hostnames; default: the system's.

    Raises:
        TopologyError: sources contradict each other or themselves, or what is needed is missing.

    Example:
        >>> place = discover({"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_SKIP_MDS_QUERY": "1"})
        >>> str(place.system), place.system.slice.num_hosts  # doctest: +SKIP
        ('v5e:2x4', 1)
    """
    from_variables = describe_environment(environ)
    sources = [arguments or Description(), from_variables]
    sources.append(describe_kubernetes(environ, from_variables))
    if environ.get(SKIP_METADATA, "").lower() not in {"1", "true"}:
        sources.append(describe_metadata(metadata or MetadataServer.from_environment(environ)))
    sources.append(describe_hardware(root))
    return place_from(combine(sources), own_name=own_name or socket.gethostname())


def place_from(known: Description, *, own_name: str | None = None) -> Place:
    """Return where a host stands of which this is known; a pure function.

    Raises:
        TopologyError: it cannot be, or is not enough.
    """
    slice_ = find_slice(known)
    num_slices = find_num_slices(known)
    return Place(
        system=System(slice=slice_, num_slices=num_slices),
        slice_index=find_slice_index(known, num_slices),
        host=find_host(known, slice_, own_name),
        hostnames=known.hostnames.value if known.hostnames else (),
        coordinator=known.coordinator.value if known.coordinator else None,
        origins={name: claim.origin for name, claim in known.claims().items()},
    )


def _given(name: str, value: int | None) -> Claim[int] | None:
    return None if value is None else Claim(value, f"the argument {name}={value}")
