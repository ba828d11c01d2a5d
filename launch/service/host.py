"""Who this host is, for the others."""

from __future__ import annotations

import os
import platform
import secrets
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

from tpu_dist.launch.pod import PodConfig
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.client import terms

_MUST_AGREE = ("torch", "jax", "jaxlib", "libtpu")
_NAMED_HOSTS = 2  # the first hosts of a slice send its list of names, so that one may be missing


def describe_host(
    pod: PodConfig,
    *,
    run_id: str,
    num_workers: int,
    max_restarts: int,
    stop_timeout: timedelta,
) -> pb.Host:
    """Return what this host says of itself as it joins."""
    host = pb.Host(
        run_id=run_id,
        name=pod.name,
        incarnation=secrets.token_hex(8),
        address=pod.address,
        pid=os.getpid(),
        num_workers=num_workers,
        node_rank=-1 if pod.node_rank is None else pod.node_rank,
        versions=_versions(),
        terms=terms(
            min_hosts=pod.min_hosts,
            max_hosts=pod.max_hosts,
            max_restarts=max_restarts,
            join_timeout=pod.join_timeout,
            last_call=pod.last_call,
            stop_timeout=stop_timeout,
        ),
    )
    place = pod.place
    if place is not None:
        slice_ = place.system.slice
        host.place.CopyFrom(
            pb.Place(
                topology=str(place.system),
                slice=place.slice_index,
                host=place.host,
                coords=slice_.chips_of(place.host)[0],
                num_chips=slice_.chips_per_host,
                hostnames=place.hostnames if place.host < _NAMED_HOSTS else (),
            )
        )
    return host


def _versions() -> dict[str, str]:
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _MUST_AGREE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
