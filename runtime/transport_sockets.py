"""Cutting the connections of the CPU stand-in's transport, so that a blocked program returns.

XLA has no call that ends a running collective. On the CPU platform it waits in gloo, on plain TCP
connections of this process: shutting those down makes the program return an error within
milliseconds, here and on every peer, and the threads end as threads should. Without it a
process that gave up on a peer could neither go on nor exit (jaxlib 0.10.2 aborts it on the way
out).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

SocketId = str  # what /proc/self/fd links to, e.g. "socket:[12345]"; names one socket for good


def listening_ports() -> frozenset[int]:
    """The TCP ports on which this process takes connections."""
    ports = set()
    for _, duplicate in _tcp_sockets():
        with duplicate:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(duplicate.getsockname()[1])
    return frozenset(ports)


class TransportConnections:
    """The connections that the transport opens for one set of ranks, from now until complete()."""

    def __init__(self, ports: frozenset[int]) -> None:
        """`ports`: where the transports of those ranks listen; what else is open is the user's."""
        self._ports = ports
        self._older = frozenset(identity for identity, _ in self._open())
        self._own: frozenset[SocketId] | None = None

    def complete(self) -> None:
        """No more will come."""
        self._own = frozenset(identity for identity, _ in self._open()) - self._older

    def cut(self) -> None:
        """Shut down those that are there."""
        for identity, duplicate in self._open():
            if identity in self._own if self._own is not None else identity not in self._older:
                duplicate.shutdown(socket.SHUT_RDWR)

    def _open(self) -> Iterator[tuple[SocketId, socket.socket]]:
        """All connections that have one end at one of the ports."""
        for identity, duplicate in _tcp_sockets():
            with duplicate:
                try:
                    ends = duplicate.getsockname()[1], duplicate.getpeername()[1]
                except OSError:  # not connected, or not any more
                    continue
                if not self._ports.isdisjoint(ends):
                    yield identity, duplicate


def _tcp_sockets() -> Iterator[tuple[SocketId, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            identity = os.readlink(f"/proc/self/fd/{name}")
            if not identity.startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        is_tcp = duplicate.type == socket.SOCK_STREAM
        if is_tcp and duplicate.family in (socket.AF_INET, socket.AF_INET6):
            yield identity, duplicate
        else:
            duplicate.close()
