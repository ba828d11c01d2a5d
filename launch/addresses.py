"""By which address a host is reached: from the route to a peer, never from its own name."""

from __future__ import annotations

import ipaddress
import socket

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # documentation addresses: nothing is sent to them


def own_address(peer: str) -> str | None:
    """Return the address from which this host would speak to `peer`; sends nothing.

    A name of this host may be 127.0.1.1 in its own /etc/hosts (Debian's custom), by which nobody
    else reaches it; then the address of the default route is taken. None where there is no route.
    """
    found = _source_address(peer)
    if found is None or (is_loopback(found) and not names_loopback(peer)):
        others = [each for each in map(_source_address, _ELSEWHERE) if each is not None]
        return next((each for each in others if not is_loopback(each)), None)
    return found


def is_own_address(host: str) -> bool:
    """Whether `host` names this machine: whether one can listen on its address here."""
    for family, address in _resolve(host):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
                return True
        except OSError:
            continue
    return False


def names_loopback(host: str) -> bool:
    """Whether the text itself says loopback: localhost, 127.0.0.1, ::1."""
    return host == "localhost" or is_loopback(host)


def is_loopback(address: str) -> bool:
    """Whether an address, not a name, is a loopback address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _source_address(peer: str) -> str | None:
    for family, address in _resolve(peer):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # of UDP: asks for the route
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host; none where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]
