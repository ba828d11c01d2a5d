"""The service: one event loop, one stream per host, a `Job` for each run."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.checks import (
    MAX_HOSTS,
    MAX_MESSAGE_BYTES,
    MAX_SPARES,
    Refused,
    check_host,
    parse_message,
)
from tpu_dist.launch.service.job import Job
from tpu_dist.launch.service.metrics import Counters, render
from tpu_dist.launch.service.roster import Member
from tpu_dist.launch.service.security import Security

_logger = logging.getLogger(__name__)

SERVICE = "tpu_dist.rendezvous.v1.Rendezvous"
FIRST_WORD_SECONDS = 30.0  # that a connection gets to say who it is
MAX_RUNS = 64
_LAST_WRITE_SECONDS = 5.0

# Both sides ping. A peer that does not answer (stopped, cut off, switched off) is dropped after the
# sum of the two, whatever its kernel still acknowledges. The service looks sooner: it has others to
# tell. Its hosts notice its process's end at once, and look for the end of its machine only.
PING_SECONDS = 2.0
PING_ANSWER_SECONDS = 4.0
HOST_PING_SECONDS = 10.0
HOST_PING_ANSWER_SECONDS = 10.0


def pings(every: float, answer: float) -> tuple[tuple[str, int], ...]:
    """Return gRPC's options for pinging the other side."""
    return (
        ("grpc.keepalive_time_ms", int(every * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer * 1000)),
        ("grpc.http2.ping_timeout_ms", int(answer * 1000)),  # a minute, by default
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


_OPTIONS = (
    *pings(PING_SECONDS, PING_ANSWER_SECONDS),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16_384),
)


class PortTakenError(LaunchError):
    """Another process listens there."""


@dataclass(slots=True, kw_only=True)
class RendezvousServer:
    """The service; use `start`, then `stop`. For one event loop.

    Attributes:
        only_run: the one run that is served; None serves any.
        security: what hosts must prove themselves by.
        counters: what has happened.
        has_ended: whether a run has come to its end.
    """

    only_run: str | None = None
    security: Security = field(default_factory=Security)
    counters: Counters = field(default_factory=Counters)
    has_ended: bool = False
    _jobs: dict[str, Job] = field(default_factory=dict)
    _server: Any = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port, which the system chooses for 0.

        Raises:
            LaunchError: others than this machine could reach it, and it is not protected.
            PortTakenError: the port is taken.
        """
        self.security.check_listening(host)
        _check_free(host, port)
        self._server = server = grpc.aio.server(
            options=_OPTIONS, maximum_concurrent_rpcs=MAX_HOSTS + MAX_SPARES
        )
        join = grpc.stream_stream_rpc_method_handler(self._join)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Join": join}),)
        )
        checker = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        for name in ("", SERVICE):
            await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
        credentials = self.security.server_credentials()
        address = f"{host}:{port}"
        try:
            if credentials is None:
                bound: int = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PortTakenError(f"cannot listen on {address}: is it taken? {error}") from error
        await server.start()
        return bound

    async def stop(self) -> None:
        """End all connections."""
        for job in self._jobs.values():
            job.end()
        if self._server is not None:
            await self._server.stop(grace=0.2)

    @property
    def num_hosts(self) -> int:
        """Hosts that are connected."""
        return sum(job.num_hosts for job in self._jobs.values())

    def page(self) -> str:
        """Return Prometheus's page."""
        return render(
            self.counters,
            hosts_here=self.num_hosts,
            hosts_waiting=sum(len(job.waiting) for job in self._jobs.values()),
            runs=len(self._jobs),
        )

    async def _join(self, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            job, member, standing = await self._admit(context)
        except Refused as refused:
            await self._refuse(context, refused)
            return
        why = "its connection ended: its launcher was killed, or its machine or network is gone"
        refusal: Refused | None = None
        writer = asyncio.create_task(_write(member, context))
        try:
            job.update(member, standing)
            while (data := await context.read()) is not grpc.aio.EOF:
                job.update(member, parse_message(data).standing)
        except Refused as refused:
            refusal = refused
            why = f"it sent what cannot be read: {refused.why}"
        finally:
            job.lost(member, why)
            self.has_ended |= job.closed is not None
            if not job.num_hosts and self._jobs.get(job.run_id) is job:
                del self._jobs[job.run_id]
                job.end()
            # gRPC cannot end a stream within a write: let that come to its end, good or bad.
            member.outbox.put_nowait(())
            await asyncio.wait({writer}, timeout=_LAST_WRITE_SECONDS)
        if refusal is not None:
            await self._refuse(context, refusal)

    async def _admit(self, context: Any) -> tuple[Job, Member, pb.Standing]:
        if not self.security.admits(context.invocation_metadata()):
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED,
                "this run wants its token: set TPU_LAUNCH_TOKEN_FILE to the same secret everywhere",
            )
        try:
            async with asyncio.timeout(FIRST_WORD_SECONDS):
                data = await context.read()
        except TimeoutError:
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "it did not say who it is") from None
        if data is grpc.aio.EOF:
            raise Refused(grpc.StatusCode.CANCELLED, "it went before it said who it is")
        message = parse_message(data)
        host = message.host
        check_host(host)
        if self.only_run not in (None, host.run_id):
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"host {host.name} is of run {host.run_id!r}, and here is run {self.only_run!r}: "
                f"give both the same --rdzv-id, or this one another --rdzv-endpoint",
            )
        job = self._jobs.get(host.run_id)
        if job is None:
            if len(self._jobs) >= MAX_RUNS:
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_RUNS} runs are here")
            job = Job(host.run_id, host, self.counters)
        task = asyncio.current_task()
        assert task is not None
        member = Member(host=host, cut=task.cancel)
        job.join(member, message.standing)
        self._jobs[host.run_id] = job
        return job, member, message.standing

    async def _refuse(self, context: Any, refused: Refused) -> None:
        if refused.code is not grpc.StatusCode.CANCELLED:
            self.counters.peers_refused += 1
            _logger.warning("refused %s: %s", context.peer(), refused.why)
        await context.abort(refused.code, refused.why)


def _check_free(host: str, port: int) -> None:
    """Find out whether the port is taken, which gRPC would print on its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        raise PortTakenError(f"port {port} of {host} is taken by another process") from error


async def _write(member: Member, context: Any) -> None:
    while True:
        parts = await member.outbox.get()
        if not parts:
            return
        try:
            await context.write(b"".join(parts))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # the stream is over, which its reader notices
