"""Short messages between the processes of one job, beside the collectives.

Collectives say nothing when they stall. This channel lets a rank ask another where it is, tell it
that a group has failed, and match sends with receives. Connections are opened when first needed;
a connection that closes tells that the peer's process has ended.

A message is a kind (str), a JSON-able mapping and raw bytes. Messages of one rank to another arrive
in order. Handlers run on the channel's one thread: they must not block.
"""

from __future__ import annotations

import itertools
import json
import logging
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from tpu_dist.topology.errors import PeerLostError

_logger = logging.getLogger(__name__)

Meta = dict[str, Any]
Handler = Callable[[int, Meta, bytes], Meta | None]
LinkHandler = Callable[[int, str, socket.socket, bytes], None]

_FRAME = struct.Struct("!II")
_MAX_HELLO_BYTES = 4096
CONNECT_TIMEOUT = timedelta(seconds=5)


class _Connection:
    """One TCP connection; written by any thread, read by the channel's."""

    def __init__(self, sock: socket.socket, rank: int | None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.rank = rank  # None until an accepted peer has said hello
        self.received = bytearray()
        self.unsent = bytearray()
        self.lock = threading.Lock()

    def write(self, frame: bytes) -> bool:
        """Send what fits now; True if something is left for the channel's thread."""
        with self.lock:
            if not self.unsent:
                try:
                    frame = frame[self.socket.send(frame) :]
                except BlockingIOError:
                    pass
            self.unsent += frame
            return bool(self.unsent)

    def flush(self) -> bool:
        """Send more of what is left; True if there still is something."""
        with self.lock:
            if self.unsent:
                try:
                    del self.unsent[: self.socket.send(self.unsent)]
                except BlockingIOError:
                    pass
            return bool(self.unsent)


class Channel:
    """This process's end; close() ends its thread. All methods may be called from any thread.

    What peers say before serve() waits for it.
    """

    resolve: Callable[[int], tuple[str, int]]
    """Returns the (host, port) where another rank's channel listens; to be set before any send."""

    def __init__(self, *, rank: int, host: str, token: str) -> None:
        """Listen on a free port of `host`.

        Args:
            rank: the rank of this process in the job.
            host: the address to listen on.
            token: shared by the job's processes; connections without it are refused.
        """
        self.rank = rank
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._handlers: dict[str, Handler] = {"reply": self._on_reply}
        self._link_handler: LinkHandler | None = None
        self._lost_callbacks: list[Callable[[int], None]] = []
        self._outgoing: dict[int, _Connection] = {}
        self._lost: set[int] = set()
        self._connecting = threading.Lock()
        self._requests: dict[int, tuple[int, Future[Meta]]] = {}  # by number: who was asked
        self._request_ids = itertools.count()
        self._is_serving = False
        self._closed = False
        # Changed by the channel's thread only:
        self._readers: dict[socket.socket, _Connection] = {}
        self._ended: set[int] = set()  # ranks of which a connection ended, not yet told
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tpu_dist-channel", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Hear what peers say; to be called when all handlers are there."""
        self._is_serving = True
        self._wake()

    def on(self, kind: str, handler: Handler) -> None:
        """Call `handler`(sender's rank, meta, body) for messages of `kind`.

        What it returns, if it is a mapping, answers the sender's ask().
        """
        self._handlers[kind] = handler

    def on_lost(self, callback: Callable[[int], None]) -> None:
        """Call `callback`(rank) on the channel's thread when a peer's connection has closed."""
        self._lost_callbacks.append(callback)

    def send(self, rank: int, kind: str, meta: Mapping[str, Any], body: bytes = b"") -> None:
        """Send one message; returns once it is queued.

        Raises:
            PeerLostError: the peer's process has ended or cannot be reached.
        """
        connection = self._connect(rank)
        try:
            pending = connection.write(_frame(kind, meta, body))
        except OSError as error:
            self._mark_lost(rank)
            raise PeerLostError(f"rank {rank} is gone: {error}") from error
        if pending:
            self._wake()

    def on_link(self, handler: LinkHandler) -> None:
        """Call `handler`(peer's rank, name, socket, first bytes) when a peer has opened a link.

        The socket is the handler's then. It runs on the channel's thread.
        """
        self._link_handler = handler

    def open_link(self, rank: int, name: str) -> socket.socket:
        """A connection of its own to a peer's on_link() handler; the caller closes it.

        Raises:
            PeerLostError: the peer's process has ended or cannot be reached.
        """
        with self._connecting:
            sock = self._dial(rank)
        sock.sendall(self._hello(link=name))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def watch(self, rank: int) -> None:
        """See that on_lost() will tell if `rank` ends, though nothing is sent to it.

        Raises:
            PeerLostError: it has ended already.
        """
        self._connect(rank)

    def ask(self, rank: int, kind: str, meta: Mapping[str, Any]) -> Future[Meta]:
        """Send a message and return the future of its answer; it fails if the peer is lost."""
        request = next(self._request_ids)
        answer: Future[Meta] = Future()
        self._requests[request] = (rank, answer)
        try:
            self.send(rank, kind, {**meta, "request": request})
        except PeerLostError as error:
            self._requests.pop(request, None)
            answer.set_exception(error)
        return answer

    def is_lost(self, rank: int) -> bool:
        """Whether the peer's process is known to have ended."""
        return rank in self._lost

    def close(self) -> None:
        """End the thread and close all connections; idempotent."""
        if not self._closed:
            self._closed = True
            self._wake()
            self._thread.join(timeout=5)
            self._wake_writer.close()
            self._handlers.clear()  # what they belong to holds this channel
            self._lost_callbacks.clear()
            self._link_handler = None

    # --- connections

    def _connect(self, rank: int) -> _Connection:
        with self._connecting:
            connection = None if rank in self._lost else self._outgoing.get(rank)
            if connection is not None:
                return connection
            connection = _Connection(self._dial(rank), rank)
            connection.write(self._hello())
            self._outgoing[rank] = connection
        self._wake()
        return connection

    def _dial(self, rank: int) -> socket.socket:
        if rank in self._lost:
            raise PeerLostError(f"rank {rank} is gone: its process has ended")
        host, port = self.resolve(rank)
        try:
            sock = socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds())
        except OSError as error:
            self._lost.add(rank)
            is_refused = isinstance(error, ConnectionRefusedError)
            why = "its process has ended" if is_refused else "its machine does not answer"
            raise PeerLostError(f"rank {rank} is gone: {why} ({host}:{port}: {error})") from error
        sock.settimeout(None)
        return sock

    def _hello(self, **more: str) -> bytes:
        return _frame("hello", {"token": self._token, "rank": self.rank, **more}, b"")

    def _mark_lost(self, rank: int) -> None:
        if self._closed:
            return
        with self._connecting:
            if rank in self._lost:
                return
            self._lost.add(rank)
        for request, (asked, answer) in list(self._requests.items()):
            if asked == rank and self._requests.pop(request, None) is not None:
                answer.set_exception(PeerLostError(f"rank {rank} has ended before it answered"))
        for callback in self._lost_callbacks:
            callback(rank)

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"x")
        except OSError:  # full: it will wake anyhow; closed: it has ended
            pass

    # --- the thread

    def _run(self) -> None:
        is_accepting = False
        while not self._closed:
            if self._is_serving and not is_accepting:
                self._selector.register(self._listener, selectors.EVENT_READ)
                is_accepting = True
            for rank, connection in list(self._outgoing.items()):
                if rank not in self._lost:
                    self._follow(connection)
            # What a peer said on its own connection, which may not even be accepted yet, comes
            # before the news of its end: so that waits for a round in which nothing was ready.
            ready = self._selector.select(0 if self._ended else None)
            for key, events in ready:
                self._handle_ready(key.fileobj, events)
            if not ready:
                self._tell_ended()
        for connection in [*self._readers.values(), *self._outgoing.values()]:
            connection.socket.close()
        self._listener.close()
        self._wake_reader.close()
        self._selector.close()

    def _handle_ready(self, ready: object, events: int) -> None:
        if ready is self._listener:
            self._accept()
        elif ready is self._wake_reader:
            _drain(self._wake_reader)
        elif isinstance(ready, socket.socket) and ready in self._readers:
            self._serve(self._readers[ready], events)

    def _tell_ended(self) -> None:
        ended, self._ended = self._ended, set()
        for rank in ended:
            if not self._hears(rank):
                self._mark_lost(rank)

    def _follow(self, connection: _Connection) -> None:
        """Watch a connection for its end, and for room while something is unsent."""
        wanted = selectors.EVENT_READ
        if connection.unsent:
            wanted |= selectors.EVENT_WRITE
        try:
            if connection.socket not in self._readers:
                self._readers[connection.socket] = connection
                self._selector.register(connection.socket, wanted)
            elif self._selector.get_key(connection.socket).events != wanted:
                self._selector.modify(connection.socket, wanted)
        except (ValueError, KeyError):  # its end was met meanwhile
            self._readers.pop(connection.socket, None)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._readers[sock] = _Connection(sock, None)
        self._selector.register(sock, selectors.EVENT_READ)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                while chunk := connection.socket.recv(1 << 18):
                    connection.received += chunk
                raise ConnectionResetError("closed by the peer")
        except BlockingIOError:
            self._dispatch(connection)
        except OSError:
            if self._dispatch(connection):  # what came before the end still counts
                self._end(connection)

    def _end(self, connection: _Connection) -> None:
        if self._readers.pop(connection.socket, None) is None:  # handed over
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.rank is not None:
            self._ended.add(connection.rank)

    def _hears(self, rank: int) -> bool:
        """Whether a connection that `rank` opened is still open: its last words may be in there."""
        return any(
            other.rank == rank and other is not self._outgoing.get(rank)
            for other in self._readers.values()
        )

    def _dispatch(self, connection: _Connection) -> bool:
        """Handle what has come in whole; False if it was not a peer's, and the connection ended."""
        try:
            for kind, meta, body in _take_frames(connection):
                if connection.rank is not None:
                    self._handle(connection.rank, kind, meta, body)
                elif kind == "hello" and meta["token"] == self._token:
                    connection.rank = int(meta["rank"])
                    if "link" in meta:
                        self._hand_over(connection, meta["link"])
                        break
                else:
                    raise ValueError("it came without this job's token")
        except (ValueError, TypeError, KeyError) as error:
            _logger.warning("a connection to this job's channel was refused: %s", error)
            self._end(connection)
            return False
        return True

    def _hand_over(self, connection: _Connection, name: str) -> None:
        """It becomes a link: what follows its hello is not for us."""
        self._selector.unregister(connection.socket)
        del self._readers[connection.socket]
        connection.socket.setblocking(True)
        assert self._link_handler is not None and connection.rank is not None
        received = bytes(connection.received)
        self._link_handler(connection.rank, name, connection.socket, received)

    def _handle(self, rank: int, kind: str, meta: Meta, body: bytes) -> None:
        try:
            answer = self._handlers[kind](rank, meta, body)
            if answer is not None:
                self.send(rank, "reply", {**answer, "request": meta["request"]})
        except PeerLostError:
            pass  # it asked and ended
        except Exception:
            _logger.exception("message %r of rank %d could not be handled", kind, rank)

    def _on_reply(self, rank: int, meta: Meta, body: bytes) -> None:
        _, future = self._requests.pop(meta["request"], (rank, None))
        if future is not None:
            future.set_result(meta)


def _frame(kind: str, meta: Mapping[str, Any], body: bytes) -> bytes:
    head = json.dumps([kind, meta]).encode()
    return _FRAME.pack(len(head), len(body)) + head + body


def _take_frames(connection: _Connection) -> Iterator[tuple[str, Meta, bytes]]:
    """The messages that have come in whole.

    Raises:
        ValueError: these are no messages, or too long for one who has not said hello.
    """
    buffer = connection.received
    while len(buffer) >= _FRAME.size:
        head_size, body_size = _FRAME.unpack_from(buffer)
        if connection.rank is None and head_size + body_size > _MAX_HELLO_BYTES:
            raise ValueError("its first message is too long")
        body_start = _FRAME.size + head_size
        if len(buffer) < body_start + body_size:
            return
        kind, meta = json.loads(buffer[_FRAME.size : body_start])
        body = bytes(buffer[body_start : body_start + body_size])
        del buffer[: body_start + body_size]
        yield kind, meta, body


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        pass
