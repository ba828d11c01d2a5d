"""Links: direct connections among a few ranks, on which they swap short blocks in step.

The channel's messages pass through its one thread, and tell each rank something of its own. Links
are for what all ranks of a set do together, and wait for: the thread that calls reads and writes
the sockets itself, so an exchange costs one trip over the wire and no hand-over.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from tpu_dist.runtime.channel import Channel
from tpu_dist.topology.errors import PeerLostError

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
_OPEN_PAUSE_SECONDS = 0.02  # how often a wait for peers looks whether it should end


class _Incoming:
    """The receiving end of a link, and what has come in too early."""

    def __init__(self, sock: socket.socket, received: bytes) -> None:
        self.socket = sock
        self._received = bytearray(received)

    def fill(self) -> None:
        """Read what there is; blocks while there is nothing."""
        chunk = self.socket.recv(_RECEIVE_BYTES)
        if not chunk:
            raise ConnectionResetError("a peer has closed its link")
        self._received += chunk

    def take(self) -> list[bytes]:
        """The blocks of the next frame; blocks until it is whole."""
        while len(self._received) < _LENGTH.size:
            self.fill()
        (size,) = _LENGTH.unpack_from(self._received)
        end = _LENGTH.size + size
        while len(self._received) < end:
            self.fill()
        frame = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        blocks, start = [], 0
        while start < size:
            (length,) = _LENGTH.unpack_from(frame, start)
            start += _LENGTH.size
            blocks.append(frame[start : start + length])
            start += length
        return blocks


class Links:
    """One process's end of the links of `num_ranks` ranks; made by a Switchboard.

    Bruck's all-gather, in ceil(log2 n) steps: at a distance of 1, 2, 4 ... each rank passes what it
    has to the one so many places back. One thread at a time; cut() from any.
    """

    def __init__(
        self, place: int, num_ranks: int, steps: Sequence[tuple[int, socket.socket, _Incoming]]
    ) -> None:
        self._place = place
        self._num_ranks = num_ranks
        self._steps = tuple(steps)

    def all_gather(self, block: bytes) -> list[bytes]:
        """Everybody's block, by place; sizes may differ. Blocks until the others call it too.

        Raises:
            OSError: a peer has ended, or the links were cut.
        """
        blocks = [block]
        for distance, outgoing, incoming in self._steps:
            count = min(distance, self._num_ranks - distance)
            blocks += _swap(outgoing, _frame(blocks[:count]), incoming)
        turn = self._num_ranks - self._place  # blocks[k] came from the rank k places further on
        return blocks[turn:] + blocks[:turn]

    def cut(self) -> None:
        """Make a call that is under way fail, here and where a peer waits for this end."""
        for _, outgoing, incoming in self._steps:
            for sock in (outgoing, incoming.socket):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # its peer has gone already
                    continue

    def close(self) -> None:
        """Close the sockets; not while a call is under way."""
        for _, outgoing, incoming in self._steps:
            outgoing.close()
            incoming.socket.close()


class Switchboard:
    """Opens the links of this process, and keeps those that peers open until they are asked for."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arrived: dict[tuple[str, int], _Incoming] = {}  # by name and the opener's rank
        self._changed = threading.Condition()
        channel.on_link(self._on_link)

    def open(self, ranks: Sequence[int], name: str, check: Callable[[], None]) -> Links:
        """Link this process with the other `ranks`; blocks until they do so too.

        Args:
            ranks: global ranks in an order that is the same on all.
            name: tells these links from others of the same ranks; the same on all.
            check: called now and then while peers are missing; raises to give up.

        Raises:
            PeerLostError: a peer's process has ended.
        """
        place, num_ranks = ranks.index(self._channel.rank), len(ranks)
        distances = [1 << step for step in range((num_ranks - 1).bit_length())]
        with contextlib.ExitStack() as undo:
            outgoing: dict[int, socket.socket] = {}
            for distance in distances:
                receiver = ranks[(place - distance) % num_ranks]
                outgoing[receiver] = self._channel.open_link(receiver, f"{name}/{distance}")
                undo.callback(outgoing[receiver].close)

            def check_all() -> None:
                check()
                for rank, sock in outgoing.items():
                    if _has_ended(sock):
                        raise PeerLostError(f"rank {rank} is gone: its process has ended")

            incoming = []
            for distance in distances:
                sender = ranks[(place + distance) % num_ranks]
                incoming.append(self._await(sender, f"{name}/{distance}", check_all))
                undo.callback(incoming[-1].socket.close)
            undo.pop_all()
        steps = list(zip(distances, outgoing.values(), incoming, strict=True))
        return Links(place, num_ranks, steps)

    def close(self) -> None:
        """Close what nobody has asked for."""
        with self._changed:
            for incoming in self._arrived.values():
                incoming.socket.close()
            self._arrived.clear()

    def _await(self, rank: int, name: str, check: Callable[[], None]) -> _Incoming:
        key = (name, rank)
        with self._changed:
            while not self._changed.wait_for(lambda: key in self._arrived, _OPEN_PAUSE_SECONDS):
                check()
            return self._arrived.pop(key)

    def _on_link(self, rank: int, name: str, sock: socket.socket, received: bytes) -> None:
        with self._changed:
            self._arrived[name, rank] = _Incoming(sock, received)
            self._changed.notify_all()


def _has_ended(outgoing: socket.socket) -> bool:
    """Whether the receiving end of a link is gone: nothing but its end ever comes from there."""
    try:
        return outgoing.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _frame(blocks: Sequence[bytes]) -> bytes:
    parts = [part for block in blocks for part in (_LENGTH.pack(len(block)), block)]
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


def _swap(outgoing: socket.socket, frame: bytes, incoming: _Incoming) -> list[bytes]:
    """Send a frame and take one. Neither waits for the other: the peers do the same."""
    left = memoryview(frame)
    left = left[_send_some(outgoing, left) :]
    if left:
        poll = select.poll()
        poll.register(outgoing, select.POLLOUT)
        poll.register(incoming.socket, select.POLLIN)
        while left:
            for descriptor, _ in poll.poll():
                if descriptor == outgoing.fileno():
                    left = left[_send_some(outgoing, left) :]
                else:
                    incoming.fill()
    return incoming.take()


def _send_some(outgoing: socket.socket, data: memoryview) -> int:
    try:
        return outgoing.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
