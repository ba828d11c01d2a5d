"""The rendezvous of a single host: a store in the launcher's process, on a port of the system's."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from tpu_dist.launch.rendezvous import STANDALONE

_ADDRESS = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)  # of the launcher's own requests, which nobody else delays


class StandaloneRendezvous(RendezvousHandler):
    """Each round is this host alone, rank 0 of 1, with a store of its own.

    The store listens on a loopback socket that is bound here, to port 0, and handed over: no port
    is picked and lost, launches side by side cannot collide, and the network cannot reach it. It
    serves both the launcher and the workers (MASTER_ADDR and MASTER_PORT), so it survives any
    worker; a new round gets a new one, so that nothing of the last round's keys is left.

    Not thread-safe. `shutdown` closes the store.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return this rendezvous's name."""
        return STANDALONE

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use the launcher's store: they do."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the next round; does not block.

        Raises:
            RendezvousClosedError: after `set_closed` or `shutdown`.
        """
        if self._closed:
            raise RendezvousClosedError(f"run {self._run_id!r} is over")
        self._store = _open_store()
        return RendezvousInfo(
            PrefixStore("tpu_launch", self._store),
            rank=0,
            world_size=1,
            bootstrap_store_info=RendezvousStoreInfo(_ADDRESS, self._store.port),
        )

    def is_closed(self) -> bool:
        """Whether there will be no further round."""
        return self._closed

    def set_closed(self) -> None:
        """Allow no further round."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many hosts wait to join: none can."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._closed = True
        self._store = None
        return True


def _open_store() -> TCPStore:
    with socket.create_server((_ADDRESS, 0), backlog=socket.SOMAXCONN) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
