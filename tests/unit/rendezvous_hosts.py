"""Hosts for tests of the rendezvous: the real client and service on loopback, without workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.membership import Membership
from tpu_dist.launch.service.security import Security
from tpu_dist.launch.service.server import RendezvousServer

DEADLINE = 20.0


def in_loop(test: Coroutine[Any, Any, None]) -> None:
    """Run a test that waits for things, within a deadline."""
    asyncio.run(asyncio.wait_for(test, 60))


def host(name: str, *, hosts: int = 2, max_hosts: int | None = None, **fields: Any) -> pb.Host:
    """Return a host of a run that wants so many."""
    terms = {"join_seconds": 30.0, "stop_seconds": 5.0, "max_restarts": 3}
    terms.update(
        {key: fields.pop(key) for key in list(fields) if key in pb.Terms.DESCRIPTOR.fields_by_name}
    )
    description: dict[str, Any] = {
        "run_id": "run",
        "name": name,
        "incarnation": f"first-{name}",
        "address": f"{name}.test",
        "num_workers": 2,
        "node_rank": -1,
    }
    return pb.Host(
        **(description | fields),
        terms=pb.Terms(min_hosts=hosts, max_hosts=max_hosts or hosts, **terms),
    )


class TestHost:
    """A host that answers as a launcher does, unless told otherwise, and keeps what it heard."""

    __test__ = False

    def __init__(self, port: int, description: pb.Host, security: Security | None = None) -> None:
        self.heard: list[pb.ToHost] = []
        self.assigned: pb.Assigned | None = None
        self.failure: pb.Failure | None = None  # what it says when it stops
        self._news = asyncio.Event()
        self.membership = Membership(
            endpoint=f"127.0.0.1:{port}",
            host=description,
            security=security or Security(),
            on_message=self._hear,
            first_patience=DEADLINE,
        )
        self.task = asyncio.ensure_future(self.membership.run())

    def tell(self, state: pb.State, **fields: Any) -> None:
        standing = pb.Standing()
        standing.CopyFrom(self.membership.standing)
        standing.state = state
        for name, value in fields.items():
            attribute = getattr(standing, name)
            attribute.CopyFrom(value) if hasattr(attribute, "CopyFrom") else setattr(
                standing, name, value
            )
        self.membership.tell(standing)

    async def until(self, is_so: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not is_so():
                self._news.clear()
                await self._news.wait()

    async def hear(self, kind: str, number: int = 1) -> Any:
        """Return the so-manieth message of a kind, as soon as it is there."""

        def found() -> list[pb.ToHost]:
            return [message for message in self.heard if message.WhichOneof("kind") == kind]

        await self.until(lambda: len(found()) >= number)
        return getattr(found()[number - 1], kind)

    async def round(self, number: int) -> pb.Assigned:
        await self.until(lambda: self.assigned is not None and self.assigned.round == number)
        assert self.assigned is not None
        return self.assigned

    async def die(self) -> None:
        """End the connection without a word, as a killed launcher does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def _hear(self, message: pb.ToHost) -> None:
        self.heard.append(message)
        kind = message.WhichOneof("kind")
        if kind == "assigned":
            self.assigned = got = message.assigned
            standing = pb.Standing(
                state=pb.RUNNING,
                round=got.round,
                rank=got.rank,
                num_hosts=got.num_hosts,
                restarts=got.restarts,
                members=got.members,
            )
            if got.rank == 0:
                standing.store.CopyFrom(pb.Store(address="store.test", port=got.round))
            self.membership.tell(standing)
        elif kind == "broken":
            self.tell(pb.STOPPED, **({"failure": self.failure} if self.failure else {}))
        elif kind == "verdict":
            verdict = message.verdict
            self.membership.tell(pb.Standing(round=verdict.round, restarts=verdict.restarts))
        self._news.set()


@asynccontextmanager
async def serving(
    security: Security | None = None, port: int = 0
) -> AsyncIterator[tuple[RendezvousServer, int]]:
    server = RendezvousServer(security=security or Security())
    bound = await server.start("127.0.0.1", port)
    try:
        yield server, bound
    finally:
        await server.stop()


@asynccontextmanager
async def hosts_of(port: int, *descriptions: pb.Host) -> AsyncIterator[dict[str, TestHost]]:
    """Let hosts join in this order, one after the other."""
    hosts: dict[str, TestHost] = {}
    try:
        for description in descriptions:
            hosts[description.name] = TestHost(port, description)
            await asyncio.sleep(0.02)
        yield hosts
    finally:
        for each in hosts.values():
            await each.die()
