"""The process that hosts JAX's coordination service, apart from every rank.

The service outlives any rank: a rank that loses its connection to it is ended from C++
(jaxlib 0.10.2 aborts the process, with or without a callback), so hosting it inside rank 0 would
make the death of rank 0 everybody's death. Each rank holds one plain TCP connection, its lifeline;
the process ends itself when the last of them is closed.

Run as a script, by path, so that it starts without importing torch: see coordinator.py.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time

JOIN_SECONDS = 300.0  # nobody came: the rank that started us died
LINGER_SECONDS = 1.0  # between the last lifeline's end and our own

# Heartbeats are turned off by their length: a rank that is stopped or computing must not be
# declared dead behind the back of the collectives' own timeouts.
HEARTBEAT_SECONDS = 10_000_000


def serve(host: str, num_processes: int) -> None:
    """Start the service and the lifeline's listener on free ports; print both; serve to the end."""
    from jaxlib import _jax

    # The port is held by a bound socket that never listens; gRPC binds it beside us.
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host, 0))
    port = holder.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f"{host}:{port}",
        num_processes,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=1,
        recoverable=True,
    )
    with socket.create_server((host, 0), backlog=min(4096, num_processes + 16)) as listener:
        print(port, listener.getsockname()[1], flush=True)
        _watch_lifelines(listener)
    service.shutdown()


def _watch_lifelines(listener: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    alive = 0
    deadline = time.monotonic() + JOIN_SECONDS
    while alive or time.monotonic() < deadline:
        for key, _ in selector.select(timeout=0.2):
            ready = key.fileobj
            if ready is listener:
                lifeline, _ = listener.accept()
                selector.register(lifeline, selectors.EVENT_READ)
                alive += 1
            elif isinstance(ready, socket.socket) and not _still_open(ready):
                selector.unregister(ready)
                ready.close()
                alive -= 1
                deadline = time.monotonic() + LINGER_SECONDS


def _still_open(lifeline: socket.socket) -> bool:
    try:
        return bool(lifeline.recv(64))
    except OSError:
        return False


if __name__ == "__main__":
    # Ctrl-C and a launcher's SIGTERM reach the whole process group; we end after the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(sys.argv[1], int(sys.argv[2]))
