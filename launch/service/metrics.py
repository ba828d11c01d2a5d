"""What the service counts, and the small page on which Prometheus reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields

_READ_SECONDS = 5.0
_HELP = {
    "rounds": "Rounds that were ranked.",
    "restarts": "Rounds that followed a failure.",
    "hosts_lost": "Hosts whose connection ended without a word.",
    "peers_refused": "Peers that were not let in.",
    "last_gathering_seconds": "From the first host's waiting to the ranking of the last round.",
    "hosts_here": "Hosts that are connected.",
    "hosts_waiting": "Hosts that wait for a round.",
    "runs": "Runs that have hosts.",
}
_GAUGES = frozenset({"last_gathering_seconds", "hosts_here", "hosts_waiting", "runs"})


@dataclass(slots=True)
class Counters:
    """What has happened since the service was started."""

    rounds: int = 0
    restarts: int = 0
    hosts_lost: int = 0
    peers_refused: int = 0
    last_gathering_seconds: float = 0.0


def render(counters: Counters, **gauges: float) -> str:
    """Return the page, in Prometheus's text format 0.0.4."""
    values = {field.name: getattr(counters, field.name) for field in fields(counters)} | gauges
    lines = []
    for name, value in values.items():
        kind = "gauge" if name in _GAUGES else "counter"
        full = f"tpu_launch_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {_HELP[name]}", f"# TYPE {full} {kind}", f"{full} {value:g}"]
    return "\n".join(lines) + "\n"


async def serve_page(page: Callable[[], str], host: str, port: int) -> asyncio.Server:
    """Serve the page at /metrics, over plain HTTP; the caller closes the server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                request = await reader.readline()
                while (await reader.readline()).strip():
                    pass
                found = request.split()[1:2] in ([b"/metrics"], [b"/"])
                body = page().encode() if found else b"see /metrics\n"
                writer.write(
                    b"HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s"
                    % (b"200 OK" if found else b"404 Not Found", len(body), body)
                )
                await writer.drain()
        except (OSError, ValueError, TimeoutError):
            pass  # whoever it was has gone, or does not speak HTTP
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=8_192)
