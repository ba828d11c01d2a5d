import contextlib
import socket
from collections.abc import Iterator

import pytest

from tpu_dist.runtime.transport_sockets import TransportConnections, listening_ports

SOON = 10


class Peer:
    """A server, and both ends of the connections that were opened to it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self._server.getsockname()[1]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        here = socket.create_connection(self._server.getsockname(), SOON)
        self._stack.enter_context(here)
        there, _ = self._server.accept()
        self._stack.enter_context(there)
        return here, there


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    with contextlib.ExitStack() as stack:
        yield Peer(stack), Peer(stack)


def is_open(connection: tuple[socket.socket, socket.socket]) -> bool:
    here, there = connection
    try:
        here.sendall(b"x")
        there.settimeout(SOON)
        return there.recv(1) == b"x"
    except OSError:
        return False


def test_only_connections_of_the_given_ports_and_time_are_cut(peers: tuple[Peer, Peer]) -> None:
    transport, users = peers
    older = transport.connect()
    connections = TransportConnections(frozenset({transport.port}))
    opened = [transport.connect(), transport.connect()]
    beside = users.connect()
    connections.complete()
    later = transport.connect()
    connections.cut()
    assert [is_open(connection) for connection in opened] == [False, False]
    assert is_open(older) and is_open(beside) and is_open(later)


def test_what_is_there_can_be_cut_before_it_is_complete(peers: tuple[Peer, Peer]) -> None:
    transport, users = peers
    connections = TransportConnections(frozenset({transport.port}))
    connections.cut()
    opened, beside = transport.connect(), users.connect()
    connections.cut()
    assert not is_open(opened) and is_open(beside)
    connections.complete()
    connections.cut()  # what has gone already is no error


def test_listening_ports_are_those_of_servers_alone(peers: tuple[Peer, Peer]) -> None:
    ports = listening_ports()
    here, there = peers[0].connect()
    assert {peer.port for peer in peers} <= ports
    assert here.getsockname()[1] not in ports and there.getsockname()[1] in ports
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        assert datagrams.getsockname()[1] not in listening_ports()
