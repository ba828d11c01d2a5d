"""Who is in a run: its connected hosts, what each alone may claim, and who has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.checks import (
    MAX_SPARES,
    Refused,
    came_twice,
    check_fit,
    claims_of,
)
from tpu_dist.launch.service.missing import describe_missing


@dataclass(slots=True, eq=False)
class Member:
    """One connected host.

    Attributes:
        host: who it is.
        cut: ends its connection.
        standing: what it last said.
        outbox: messages for it, serialised, in parts that many may share; () is the last.
    """

    host: pb.Host
    cut: Callable[[], object]
    standing: pb.Standing = field(default_factory=pb.Standing)
    outbox: asyncio.Queue[tuple[bytes, ...]] = field(default_factory=asyncio.Queue)

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host.name


class Roster:
    """The members of a run by name; the first of them said what all must have been told."""

    def __init__(self, first: pb.Host) -> None:
        self.members: dict[str, Member] = {}
        self._first = first
        self._claims: dict[tuple[str, object], Member] = {}
        self._gone: dict[str, tuple[float, str]] = {}  # when, why
        self._hostnames: dict[int, tuple[str, ...]] = {}  # by slice

    @property
    def terms(self) -> pb.Terms:
        """What all hosts were told alike."""
        return self._first.terms

    def add(self, member: Member) -> None:
        """Let a host in, also in the place of its own earlier connection, which is cut.

        Raises:
            Refused: it does not fit, is here already, or there are enough.
        """
        host = member.host
        check_fit(host, self._first)
        for claim in claims_of(host):
            other = self._claims.get(claim)
            if other is not None and other.host.incarnation != host.incarnation:
                raise came_twice(claim[0], host, other.host)
        old = self.members.get(host.name)
        if old is None and len(self.members) >= self.terms.max_hosts + MAX_SPARES:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"run {host.run_id!r} has {len(self.members)} hosts, and wants "
                f"{self.terms.max_hosts}",
            )
        if old is not None:
            self.remove(old)
            old.cut()
        self.members[host.name] = member
        self._claims.update(dict.fromkeys(claims_of(host), member))
        self._gone.pop(host.name, None)
        if host.place.hostnames:
            self._hostnames[host.place.slice] = tuple(host.place.hostnames)

    def remove(self, member: Member) -> None:
        """Take a member out."""
        del self.members[member.name]
        for claim in claims_of(member.host):
            if self._claims.get(claim) is member:
                del self._claims[claim]

    def has(self, member: Member) -> bool:
        """Whether this connection is its host's current one."""
        return self.members.get(member.name) is member

    def note_gone(self, name: str, now: float, why: str) -> None:
        """Remember why a host is not here."""
        self._gone[name] = (now, why)

    def those(self, names: Iterable[str]) -> list[Member]:
        """Return the members of these names that are here."""
        return [self.members[name] for name in names if name in self.members]

    def describe_missing(self, here: Sequence[pb.Host], now: float) -> str:
        """Say which hosts are missing for a round."""
        return describe_missing(
            here, wanted=self.terms.min_hosts, gone=self._gone, hostnames=self._hostnames, now=now
        )
