"""Starting JAX's coordination service in a process of its own, and connecting to it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpu_dist.runtime.coordination_server import HEARTBEAT_SECONDS
from tpu_dist.topology.errors import BringUpError

_SERVER = Path(__file__).with_name("coordination_server.py")


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """Where the coordination service and the lifelines' listener are."""

    host: str
    port: int
    lifeline_port: int

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.lifeline_port}"

    @classmethod
    def parse(cls, text: str) -> CoordinatorAddress:
        """Inverse of str()."""
        host, port, lifeline_port = text.split()
        return cls(host, int(port), int(lifeline_port))


def start_coordinator(host: str, num_processes: int, timeout: timedelta) -> CoordinatorAddress:
    """Start the service's process on ports chosen by the system; waits until it serves.

    Raises:
        BringUpError: it did not come up within `timeout`; the message has what it printed.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile() as log:
        # No pipe but stdout, and that one is closed at once: a process that outlives this one must
        # not hold open what a launcher waits for.
        process = subprocess.Popen(
            [sys.executable, str(_SERVER), host, str(num_processes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd="/",
        )
        assert process.stdout is not None
        with process.stdout as pipe:
            ready, _, _ = select.select([pipe], [], [], timeout.total_seconds())
            line = pipe.readline().decode().split() if ready else []
        if len(line) != 2:
            process.kill()
            process.wait()
            log.seek(0)
            said = log.read().decode(errors="replace")[-2000:] or "nothing"
            raise BringUpError(
                f"the coordination service did not start on {host} within "
                f"{timeout.total_seconds():.0f} s. Its process printed: {said}"
            )
    process.returncode = 0  # it outlives us; without this Popen warns of a child still running
    return CoordinatorAddress(host, int(line[0]), int(line[1]))


class CoordinatorConnection:
    """This process's connection to the coordination service, and its lifeline.

    Owned by the Runtime. `client` is jaxlib's DistributedRuntimeClient.
    """

    def __init__(self, address: CoordinatorAddress, rank: int, timeout: timedelta) -> None:
        from jaxlib import _jax

        seconds = timeout.total_seconds()
        try:
            self._lifeline = socket.create_connection(
                (address.host, address.lifeline_port), timeout=seconds
            )
            self.client: Any = _jax.get_distributed_runtime_client(
                f"{address.host}:{address.port}",
                rank,
                init_timeout=max(1, int(seconds)),
                heartbeat_timeout=HEARTBEAT_SECONDS,
                shutdown_on_destruction=False,
                use_compression=True,
            )
            self.client.connect()
        except (OSError, RuntimeError) as error:
            raise BringUpError(
                f"rank {rank} could not join the coordination service at {address.host}:"
                f"{address.port} within {seconds:.0f} s: {error}. Either some rank never got this "
                f"far (look at the other ranks' logs), or {address.host} cannot be reached from "
                f"here (set TPU_DIST_HOST on rank 0 to an address that can)."
            ) from error

    def close(self) -> None:
        """Leave the service, then let it end; in that order, or jaxlib ends this process."""
        try:
            self.client.shutdown()
        finally:
            self._lifeline.close()
