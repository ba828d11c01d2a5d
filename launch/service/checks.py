"""What is not let in: messages that cannot be, and hosts that do not fit the run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import grpc
from google.protobuf.message import DecodeError

from tpu_dist.launch.service import rendezvous_pb2 as pb

MAX_HOSTS = 16_384
MAX_WORKERS = 1_024
MAX_MESSAGE_BYTES = 2**21  # the names of 16,384 hosts; the server reads no more
MAX_SPARES = 64
_MAX_VERSIONS = 16
_MAX_TEXT = 4_096
_MAX_TRACEBACK = 16_384
_DAY = 86_400.0

_NAME = re.compile(r"[\w.:%\[\]-]{1,253}", re.ASCII)  # of hosts, and addresses of both kinds
_RUN_ID = re.compile(r"[^\x00-\x1f/]{1,253}")


class Refused(Exception):
    """A peer is refused: the status it gets, and why."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


def parse_message(data: bytes) -> pb.FromHost:
    """Return the message that a host sent, every field of its standing within bounds.

    Raises:
        Refused: it is none.
    """
    try:
        message: pb.FromHost = pb.FromHost.FromString(data)
    except DecodeError:
        raise _invalid("the message is no FromHost of this protocol") from None
    standing = message.standing
    if standing.state not in pb.State.values():
        raise _invalid(f"there is no state {standing.state}")
    numbers = (standing.round, standing.rank, standing.num_hosts, standing.restarts)
    if min(numbers) < 0 or standing.num_hosts > MAX_HOSTS or len(standing.members) > MAX_HOSTS:
        raise _invalid("the standing's numbers cannot be")
    if standing.state not in (pb.WAITING, pb.LEAVING) and not (
        standing.round > 0 and standing.rank < standing.num_hosts
    ):
        raise _invalid(f"rank {standing.rank} of {standing.num_hosts} hosts cannot be")
    if not all(map(_NAME.fullmatch, standing.members)):
        raise _invalid("a member's name cannot be")
    if standing.HasField("store") and not _is_store(standing.store):
        raise _invalid("the store's address cannot be")
    _bound(standing)
    return message


def check_host(host: pb.Host) -> None:
    """Look whether a host may exist at all.

    Raises:
        Refused: it may not.
    """
    if not _RUN_ID.fullmatch(host.run_id):
        raise _invalid("run_id must be 1 to 253 printable characters without a /")
    for field, text in (
        ("name", host.name),
        ("address", host.address),
        ("incarnation", host.incarnation),
    ):
        if not _NAME.fullmatch(text):
            raise _invalid(f"{field} {text[:80]!r} cannot be a host's")
    if not 1 <= host.num_workers <= MAX_WORKERS or not -1 <= host.node_rank < MAX_HOSTS:
        raise _invalid(f"{host.num_workers} workers, node rank {host.node_rank}: out of bounds")
    terms = host.terms
    if not (1 <= terms.min_hosts <= terms.max_hosts <= MAX_HOSTS and terms.max_restarts >= 0):
        raise _invalid(f"{terms.min_hosts} to {terms.max_hosts} hosts: at most {MAX_HOSTS} can be")
    seconds = (terms.join_seconds, terms.last_call_seconds, terms.stop_seconds)
    if not all(math.isfinite(each) and 0 <= each <= 7 * _DAY for each in seconds):
        raise _invalid("a time limit is out of bounds")
    if len(host.versions) > _MAX_VERSIONS or any(
        len(text) > 80 for item in host.versions.items() for text in item
    ):
        raise _invalid("too many versions")
    if host.HasField("place"):
        _check_place(host.place)


def check_fit(host: pb.Host, first: pb.Host) -> None:
    """Look whether a host was told the same as the host that the run began with.

    Raises:
        Refused: it was not; says what differs and from whom.
    """
    for what, mine, theirs in _differences(host, first):
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"host {host.name} has {what} {mine}, and host {first.name} of run {host.run_id!r} "
            f"has {theirs}: start all hosts alike",
        )


def claims_of(host: pb.Host) -> list[tuple[str, object]]:
    """Return what only one host of a run can have."""
    claims: list[tuple[str, object]] = [("name", host.name)]
    if host.HasField("place"):
        claims.append(("place", (host.place.slice, host.place.host)))
    if host.node_rank >= 0:
        claims.append(("node rank", host.node_rank))
    return claims


def came_twice(what: str, host: pb.Host, other: pb.Host) -> Refused:
    """Return the refusal of a host that claims what `other` has."""
    complaints = {
        "name": f"host {host.name} is in run {host.run_id!r} already (pid {other.pid} at "
        f"{other.address}). End that launcher, or give this one another --node-name",
        "place": f"hosts {host.name} and {other.name} both say they are host {host.place.host} of "
        f"slice {host.place.slice}: correct TPU_WORKER_ID of one of them",
        "node rank": f"hosts {host.name} and {other.name} both have --node-rank {host.node_rank}",
    }
    return Refused(grpc.StatusCode.ALREADY_EXISTS, complaints[what])


def _differences(host: pb.Host, first: pb.Host) -> Iterable[tuple[str, object, object]]:
    terms, theirs = host.terms, first.terms
    rows: Mapping[str, tuple[object, object]] = {
        "--nnodes": (
            f"{terms.min_hosts}:{terms.max_hosts}",
            f"{theirs.min_hosts}:{theirs.max_hosts}",
        ),
        "--max-restarts": (terms.max_restarts, theirs.max_restarts),
        "the topology": (host.place.topology or "none", first.place.topology or "none"),
        **{
            f"the version of {name}": (
                host.versions.get(name, "none"),
                first.versions.get(name, "none"),
            )
            for name in sorted({*host.versions, *first.versions})
        },
    }
    return [(what, mine, other) for what, (mine, other) in rows.items() if mine != other]


def _check_place(place: pb.Place) -> None:
    if not 1 <= len(place.topology) <= 80 or len(place.coords) not in (0, 3):
        raise _invalid("the place has no topology")
    if min(place.slice, place.host, place.num_chips, *place.coords, 0) < 0:
        raise _invalid("the place's numbers cannot be negative")
    if max(place.slice, place.host, place.num_chips) >= MAX_HOSTS:
        raise _invalid("the place's numbers are out of bounds")
    if len(place.hostnames) > MAX_HOSTS or not all(map(_NAME.fullmatch, place.hostnames)):
        raise _invalid("the place's list of hosts cannot be")


def _is_store(store: pb.Store) -> bool:
    return bool(_NAME.fullmatch(store.address)) and 0 < store.port < 65_536


def _bound(standing: pb.Standing) -> None:
    failure = standing.failure
    standing.reason = standing.reason[:_MAX_TEXT]
    if standing.HasField("failure"):
        failure.host = failure.host[:253]
        failure.message = failure.message[:_MAX_TEXT]
        failure.traceback = failure.traceback[-_MAX_TRACEBACK:]
        for field in ("age_seconds", "ran_for_seconds"):
            value = getattr(failure, field)
            if not (math.isfinite(value) and 0 <= value <= 365 * _DAY):
                setattr(failure, field, 0.0)


def _invalid(why: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, why)
