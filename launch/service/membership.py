"""A host's side of the protocol: one stream, kept up through blips and restarts of the service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from tpu_dist.launch.errors import RendezvousError
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.rendezvous_pb2_grpc import RendezvousStub
from tpu_dist.launch.service.security import Security
from tpu_dist.launch.service.server import (
    HOST_PING_ANSWER_SECONDS,
    HOST_PING_SECONDS,
    PING_ANSWER_SECONDS,
    PING_SECONDS,
    pings,
)

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 1.0
CONNECT_SECONDS = 30.0
DEFAULT_PATIENCE_SECONDS = 30.0  # with a service that was there and does not answer
# Our own name may be taken by a launcher that is gone, until the service has noticed that.
_TWICE_SECONDS = PING_SECONDS + PING_ANSWER_SECONDS + 3.0
_HELD_SECONDS = 2.0  # a stream that held as long was a connection, also if nothing came

_OPTIONS = (
    *pings(HOST_PING_SECONDS, HOST_PING_ANSWER_SECONDS),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 2**24),
)
_FINAL = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(slots=True, kw_only=True)
class Membership:
    """A host's membership in a run; use `run` and `tell` in one event loop.

    Attributes:
        endpoint: host:port of the service.
        host: who this is.
        security: what to prove it by.
        first_patience: seconds that the service gets to be there at all.
        patience: seconds that it gets to be there again.
        on_message: called with what it says.
        on_link: called with None when connected, else with what is wrong, once for each outage.
        num_connections: how many times the service has answered.
        num_streams: how many times it was told who this is.
    """

    endpoint: str
    host: pb.Host
    on_message: Callable[[pb.ToHost], None]
    on_link: Callable[[str | None], None] = lambda why: None
    security: Security = field(default_factory=Security)
    first_patience: float = 600.0
    patience: float = DEFAULT_PATIENCE_SECONDS
    standing: pb.Standing = field(default_factory=pb.Standing)
    num_connections: int = 0
    num_streams: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: bool = False

    def tell(self, standing: pb.Standing) -> None:
        """Say where this host stands, now and on any later connection."""
        self.standing = standing
        self._news.set()

    async def run(self) -> None:
        """Keep the stream up until the service ends the run or this host has left.

        Raises:
            RendezvousError: the service refuses this host, or is not to be reached for too long.
        """
        loop = asyncio.get_running_loop()
        outage: float | None = None  # since when
        tries = 0
        while True:
            self._answered = False
            began = loop.time()
            try:
                if await self._one_stream():
                    return
                why, code = "the connection was closed", grpc.StatusCode.UNAVAILABLE
            except grpc.aio.AioRpcError as error:
                why, code = error.details() or error.code().name, error.code()
            except TimeoutError:
                why, code = f"no connection within {CONNECT_SECONDS:g} s", None
            if code in _FINAL:
                raise RendezvousError(f"the rendezvous at {self.endpoint} refuses: {why}")
            if self._answered or loop.time() - began > _HELD_SECONDS:
                outage, tries = None, 0
            if outage is None:
                outage = loop.time()
                self.on_link(why)
            patience = self.patience if self.num_connections else self.first_patience
            if code is grpc.StatusCode.ALREADY_EXISTS:
                patience = _TWICE_SECONDS
            if loop.time() - outage > patience:
                if code is grpc.StatusCode.ALREADY_EXISTS:
                    raise RendezvousError(f"the rendezvous at {self.endpoint} refuses: {why}")
                raise RendezvousError(
                    f"the rendezvous at {self.endpoint} has not been reached for {patience:g} s: "
                    f"{why}. Is the first host up, is that its address, and does a firewall let "
                    f"the port through?"
                )
            pause = min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(tries, 10))
            tries += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _one_stream(self) -> bool:
        """Connect and go on until the stream ends; return whether that is the end of it all."""
        credentials = self.security.channel_credentials()
        if credentials is None:
            channel = grpc.aio.insecure_channel(self.endpoint, options=_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self.endpoint, credentials, options=_OPTIONS)
        async with channel:
            stream = RendezvousStub(channel).Join(metadata=self.security.metadata())
            writer = None
            try:
                self._news.clear()
                async with asyncio.timeout(CONNECT_SECONDS):
                    await stream.write(pb.FromHost(host=self.host, standing=self.standing))
                self.num_streams += 1
                writer = asyncio.create_task(self._write(stream))
                while (message := await stream.read()) is not grpc.aio.EOF:
                    if not self._answered:
                        self._answered = True
                        self.num_connections += 1
                        self.on_link(None)
                    self.on_message(message)
                    if message.HasField("closed"):
                        return True
                if self.standing.state == pb.LEAVING:
                    return True
                code, details = await stream.code(), await stream.details()
                if code is not grpc.StatusCode.OK:
                    raise grpc.aio.AioRpcError(code, _NO_METADATA, _NO_METADATA, details)
                return False
            except grpc.aio.BaseError:  # written to a stream that had just ended
                return False
            finally:
                if writer is not None:
                    writer.cancel()
                stream.cancel()

    async def _write(self, stream: Any) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            standing = self.standing
            try:
                await stream.write(pb.FromHost(standing=standing))
                if standing.state == pb.LEAVING:
                    await stream.done_writing()
                    return
            except (grpc.aio.AioRpcError, grpc.aio.BaseError):
                return  # the stream has ended, which its reader notices


_NO_METADATA = grpc.aio.Metadata()
