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


class CoordinatorProcess:
    """The service's process, from its start until it serves; afterwards it is on its own.

    Starting it costs about what importing jax costs, so start it first.
    """

    def __init__(self, host: str, num_processes: int) -> None:
        self._host = host
        self._log = tempfile.TemporaryFile()
        # No pipe but stdout, and that one is closed soon: a process that outlives this one must
        # not hold open what a launcher waits for.
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER), host, str(num_processes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            cwd="/",
        )

    def address(self, timeout: timedelta) -> CoordinatorAddress:
        """Wait until it serves, on ports chosen by the system, and let go of it.

        Raises:
            BringUpError: it did not come up within `timeout`; the message has what it printed.
        """
        process, seconds = self._process, timeout.total_seconds()
        assert process.stdout is not None
        with self._log, process.stdout as pipe:
            ready, _, _ = select.select([pipe], [], [], seconds)
            line = pipe.readline().decode().split() if ready else []
            if len(line) != 2:
                self.kill()
                self._log.seek(0)
                said = self._log.read().decode(errors="replace")[-2000:] or "nothing"
                raise BringUpError(
                    f"the coordination service did not start on {self._host} within {seconds:.0f} "
                    f"s. If that is not an address of this host, correct TPU_DIST_HOST or "
                    f"MASTER_ADDR. Its process printed: {said}"
                )
        process.returncode = 0  # it outlives us; without this Popen warns of a child still running
        return CoordinatorAddress(self._host, int(line[0]), int(line[1]))

    def kill(self) -> None:
        """End it: it is not needed, or does not serve."""
        self._process.kill()
        self._process.wait()


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
                # With a callback a failed connect() raises; without one it ends the process.
                missed_heartbeat_callback=lambda *_: None,
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
