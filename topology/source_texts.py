"""Readers of the texts in which the sources speak: tolerant in form, an error when unclear."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from tpu_dist.topology.accelerator_types import read_accelerator_type
from tpu_dist.topology.claims import Claim, Description
from tpu_dist.topology.coordinates import Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.shapes import orders_of, shapes_of_size
from tpu_dist.topology.slice import Wraps

T = TypeVar("T")

_UNSET_HOSTS = frozenset({"localhost", "127.0.0.1"})  # GKE's and kuberay's word for "one host"


def read_int(text: str, origin: str) -> Claim[int]:
    """Read an index or a count.

    Raises:
        TopologyError: it is none.
    """
    if not re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII):
        raise _unreadable(origin, "an index or a count, as in 3")
    return Claim(int(text), origin)


def read_bounds(text: str, origin: str) -> Claim[tuple[int, ...]]:
    """Read a grid of hosts, processes or chips: ``2,2,1``, and ``2,2,1,2`` with a chip's devices.

    Raises:
        TopologyError: it is none.
    """
    if not re.fullmatch(r"\s*[1-9]\d{0,5}(\s*,\s*[1-9]\d{0,5}){2,3}\s*", text, re.ASCII):
        raise _unreadable(origin, "a grid of three, as in 2,2,1")
    return Claim(tuple(int(part) for part in text.split(",")), origin)


def read_topology(text: str, origin: str) -> tuple[Claim[Shape], Claim[bool] | None]:
    """Read a slice's shape, ``4x4x8``, and whether it is twisted, where the text says so.

    Raises:
        TopologyError: it is none.
    """
    match = re.fullmatch(
        r"\s*([1-9]\d{0,5}(?:x[1-9]\d{0,5}){1,2})(_twisted|_untwisted)?\s*", text.lower(), re.ASCII
    )
    if match is None:
        raise _unreadable(origin, "a shape, as in 4x4x8 or 2x4")
    twisted = Claim(match[2] == "_twisted", origin) if match[2] else None
    return Claim(Shape(*map(int, match[1].split("x"))), origin), twisted


def read_wrap(text: str, origin: str) -> Claim[Wraps]:
    """Read which axes are rings: ``true,true,true``.

    Raises:
        TopologyError: it is none.
    """
    words = [word.strip().lower() for word in text.split(",")]
    if len(words) not in (2, 3) or not set(words) <= {"true", "false"}:
        raise _unreadable(origin, "three of true and false, as in true,true,false")
    x, y, z = ([word == "true" for word in words] + [False])[:3]
    return Claim((x, y, z), origin)


def read_hostnames(text: str, origin: str) -> Claim[tuple[str, ...]] | None:
    """Read a list of hosts, with or without ports, each once; None where it names no host.

    Raises:
        TopologyError: an entry is no host.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    hosts = tuple(dict.fromkeys(_host(entry, origin) for entry in entries))
    if not hosts or set(hosts) <= _UNSET_HOSTS:
        return None
    return Claim(hosts, origin)


def read_address(text: str, origin: str) -> Claim[str]:
    """Read one host, or host:port.

    Raises:
        TopologyError: it is none.
    """
    if not _HOST.fullmatch(text.strip()):
        raise _unreadable(origin, "one host, or host:port")
    return Claim(text.strip(), origin)


def read_accelerator(text: str, origin: str) -> Description:
    """Read an accelerator type: the generation, the number of chips, and the shape if it is clear.

    Raises:
        TopologyError: it is none.
    """
    try:
        named = read_accelerator_type(text)
    except TopologyError as error:
        raise TopologyError(f"{origin}: {error}") from None
    shapes = shapes_of_size(named.generation, named.num_chips)
    is_clear = len(shapes) == 1 and len(orders_of(named.generation, shapes[0])) == 1
    return Description(
        generation=Claim(named.generation, origin),
        num_chips=Claim(named.num_chips, origin),
        shape=Claim(shapes[0], origin) if is_clear else None,
    )


def read_worker_endpoints(text: str, origin: str) -> Claim[tuple[str, ...]] | None:
    """Read the metadata server's list of hosts: ``name:uid:address,...``, or plain names.

    Raises:
        TopologyError: an entry is neither.
    """
    hosts = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        parts = entry.split(":")
        if len(parts) not in (1, 3):
            raise _unreadable(origin, "hosts with commas between, as names or name:uid:address")
        hosts.append(parts[-1])
    return read_hostnames(",".join(hosts), origin)


def read_first(reader: Callable[[str, str], T], values: Mapping[str, str], *names: str) -> T | None:
    """Read the first of the named values that is set and not empty; None if there is none."""
    for name in names:
        if values.get(name, "").strip():
            return reader(values[name], f"{name}={values[name].strip()}")
    return None


# A port may follow, and after it libtpu takes an address.
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|\w[\w.-]{0,252})(?::\d{1,5}(?::[\w.\[\]:-]+)?)?", re.ASCII)


def _host(entry: str, origin: str) -> str:
    match = _HOST.fullmatch(entry)
    if match is None:
        raise _unreadable(origin, "host names or addresses with commas between")
    return match[1]


def _unreadable(origin: str, wanted: str) -> TopologyError:
    shown = origin if len(origin) <= 200 else origin[:200] + "..."
    return TopologyError(f"{shown!r} cannot be read: expected {wanted}. Correct or unset it.")
