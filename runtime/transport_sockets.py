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

SocketId = str  # what /proc/self/fd links to, e.g. "socket:[12345]"; names one connection for good


def connected_sockets() -> frozenset[SocketId]:
    """The TCP connections that this process has now."""
    found = set()
    for identity, duplicate in _tcp_sockets():
        with duplicate:
            if _is_connected(duplicate):
                found.add(identity)
    return frozenset(found)


def cut(identities: frozenset[SocketId]) -> None:
    """Shut down those of the named connections that are still there."""
    for identity, duplicate in _tcp_sockets():
        with duplicate:
            if identity in identities and _is_connected(duplicate):
                duplicate.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[tuple[SocketId, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            identity = os.readlink(f"/proc/self/fd/{name}")
            if not identity.startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            yield identity, duplicate
        else:
            duplicate.close()


def _is_connected(candidate: socket.socket) -> bool:
    try:
        candidate.getpeername()
    except OSError:
        return False
    return True
