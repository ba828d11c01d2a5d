"""In which order hosts are ranked: by what they are, never by when they came."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpu_dist.launch.service import rendezvous_pb2 as pb

_NO_RANK = 2**31  # after all that the user ranked


def host_order(host: pb.Host) -> tuple[object, ...]:
    """Return the key by which hosts are sorted to ranks: the same for the same host in any round.

    Slice by slice, and within one as libtpu numbers its hosts (x fastest), so that a worker's
    global rank is its libtpu task; without a TPU by the rank that the user gave, else by name, its
    numbers as numbers: vm-9 before vm-10.
    """
    place = (host.place.slice, host.place.host) if host.HasField("place") else (0, 0)
    node_rank = host.node_rank if host.node_rank >= 0 else _NO_RANK
    return (*place, node_rank, natural(host.name))


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key by which names sort as people count."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts)


def first_workers(hosts: Iterable[pb.Host]) -> tuple[list[int], int]:
    """Return the global rank of each host's first worker, and how many workers there are."""
    firsts, total = [], 0
    for host in hosts:
        firsts.append(total)
        total += host.num_workers
    return firsts, total
