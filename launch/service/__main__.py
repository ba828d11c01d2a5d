"""``python -m tpu_dist.launch.service``: the service as a process, told what to do on stdin.

The launcher of the first host starts it so: a process of its own, which goes on when that launcher
is killed or stopped, names that host to the others, and ends with the last of them. A secret is
never on its command line or in its environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpu_dist.launch.service.metrics import serve_page
from tpu_dist.launch.service.security import Security
from tpu_dist.launch.service.server import PortTakenError, RendezvousServer
from tpu_dist.topology.errors import TpuDistError

FIRST_HOST_SECONDS = 60.0  # for somebody to come
LINGER_SECONDS = 3.0  # after the last has gone: another may be on its way back
_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the process is told, as JSON.

    Attributes:
        host: address to listen on.
        port: 0 lets the system choose.
        run_id: of the one run to serve; None serves any.
        token: that hosts must have.
        tls_directory: see `Security`.
        metrics_port: for Prometheus, on the same address; None: none, 0: the system chooses.
        for_ever: whether to go on when nobody is here.
    """

    host: str
    port: int
    run_id: str | None = None
    token: str | None = None
    tls_directory: str | None = None
    metrics_port: int | None = None
    for_ever: bool = False


async def serve(orders: Orders, on_start: Callable[[dict[str, int]], None]) -> None:
    """Serve until a signal, or, unless for ever, until the last host has gone.

    Args:
        orders: what to serve.
        on_start: called when it serves, with its ports: ``port``, ``metrics_port``.

    Raises:
        PortTakenError: the port is taken.
        LaunchError: it may not listen there.
    """
    directory = Path(orders.tls_directory) if orders.tls_directory else None
    server = RendezvousServer(
        only_run=orders.run_id, security=Security(token=orders.token, tls_directory=directory)
    )
    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    ports = {"port": await server.start(orders.host, orders.port)}
    if orders.metrics_port is not None:
        page = await serve_page(server.page, orders.host.strip("[]"), orders.metrics_port)
        ports["metrics_port"] = page.sockets[0].getsockname()[1]
    on_start(ports)
    watch = asyncio.create_task(_until_nobody_is_here(server, ended, orders.for_ever))
    await ended.wait()
    watch.cancel()
    await server.stop()


async def _until_nobody_is_here(
    server: RendezvousServer, ended: asyncio.Event, for_ever: bool
) -> None:
    loop = asyncio.get_running_loop()
    starter = os.getppid()
    deadline = loop.time() + FIRST_HOST_SECONDS
    while not ended.is_set():
        if starter != os.getppid():  # it has gone: who else would come, before anybody has?
            starter = os.getppid()
            deadline = min(deadline, loop.time() + LINGER_SECONDS)
        if for_ever or server.num_hosts:
            deadline = loop.time() + LINGER_SECONDS
        elif server.has_ended or loop.time() >= deadline:
            ended.set()
        await asyncio.sleep(_LOOK_SECONDS)


def main() -> None:
    """Read the orders, serve, and print one line of JSON: the ports, or ``error`` and ``taken``."""
    # Who is refused is said here; the rest is said by the launchers themselves.
    logging.basicConfig(level=logging.WARNING, format="tpu-launch rendezvous: %(message)s")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal's end is not the run's
    orders = Orders(**json.load(sys.stdin))

    def answer(ports: dict[str, int]) -> None:
        print(json.dumps(ports), flush=True)
        sys.stdout.close()  # whoever started us has read what it wanted

    try:
        asyncio.run(serve(orders, answer))
    except TpuDistError as error:
        print(json.dumps({"error": str(error), "taken": isinstance(error, PortTakenError)}))
        sys.exit(1)


if __name__ == "__main__":
    main()
