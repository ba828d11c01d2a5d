"""The rendezvous of several hosts, as torch.distributed.elastic wants it; also for torchrun.

``torchrun --rdzv-backend tpu --rdzv-endpoint HOST:PORT`` comes here through the entry point
``torchrun.handlers``; tpu-launch makes one itself, and adds what torchelastic's agent cannot say.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from tpu_dist.launch.addresses import is_loopback
from tpu_dist.launch.environment import current, read_environment
from tpu_dist.launch.errors import LaunchError, RendezvousError
from tpu_dist.launch.holders import listener_on
from tpu_dist.launch.pod import PodConfig
from tpu_dist.launch.rendezvous import TPU, choose_rendezvous, listening_address
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.__main__ import Orders
from tpu_dist.launch.service.client import RendezvousClient
from tpu_dist.launch.service.host import describe_host
from tpu_dist.launch.service.process import start_service
from tpu_dist.launch.service.security import Security
from tpu_dist.launch.service.server import PortTakenError
from tpu_dist.launch.settings import merge_settings
from tpu_dist.topology.chips import scan_devices

_logger = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=60)
_CONNECT_TIMEOUT = timedelta(seconds=15)  # it listens already: this is for one that has died
_OURS = ("tpu_dist.launch", "tpu-launch")  # in the command of what may serve there
_ANY_RESTARTS = 2**31 - 1  # torchrun counts them itself


class PodRendezvous(RendezvousHandler):
    """This host's membership of a run on several hosts.

    ``next_rendezvous`` blocks until all hosts are there; everything else does not, but for the
    moment that ``shutdown`` takes to say goodbye. For one thread.

    Args:
        pod: where and who.
        host: what is said to the others.
        run_id: the run's name.
        say: called with what a user should know.
    """

    def __init__(
        self, pod: PodConfig, host: pb.Host, run_id: str, say: Callable[[str], None]
    ) -> None:
        self._pod = pod
        self._run_id = run_id
        self._say = say
        self._closed = False
        self._started = False
        self._store: TCPStore | None = None
        self._security = Security(token=pod.token, tls_directory=pod.tls_directory)
        self.client = RendezvousClient(
            str(pod.endpoint), host, self._security, say, on_outage=self._start_service_anew
        )
        self.assigned: pb.Assigned | None = None
        self.goodbye = ""

    def get_backend(self) -> str:
        """Return this rendezvous's name."""
        return TPU

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use the store of the first host's launcher: they do."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round.

        Raises:
            RendezvousClosedError: the run has ended.
            RendezvousConnectionError: the service refuses this host, is not to be reached, or too
                few hosts came; says who is missing.
        """
        if self._closed:
            raise RendezvousClosedError(f"run {self._run_id!r} is over")
        if not self._started:
            self._start_service()
        while True:
            try:
                assigned = self.client.next_round()
            except RendezvousError as error:
                raise RendezvousConnectionError(str(error)) from error
            try:
                at = self._open_store(assigned)
            except (OSError, RuntimeError) as error:
                # Most likely rank 0 has gone meanwhile: then the round is broken.
                if self.client.end_of_round() is None:
                    raise RendezvousConnectionError(
                        f"the store of host rank 0 at {assigned.store.address}:"
                        f"{assigned.store.port} is not to be reached: {error}"
                    ) from error
                self.client.settle(None)
                continue
            self.assigned = assigned
            assert self._store is not None
            return RendezvousInfo(
                PrefixStore(f"tpu_launch/{assigned.round}", self._store),
                rank=assigned.rank,
                world_size=assigned.num_hosts,
                bootstrap_store_info=RendezvousStoreInfo(at.address, at.port),
            )

    def is_closed(self) -> bool:
        """Whether there will be no further round."""
        return self._closed or isinstance(self.client.end_of_round(), pb.Closed)

    def set_closed(self) -> None:
        """Allow no further round, on any host."""
        self.shutdown()

    def num_nodes_waiting(self) -> int:
        """Return 1 where the round is broken: torchrun's agent then starts its workers anew."""
        return int(isinstance(self.client.end_of_round(), pb.Broken))

    def get_run_id(self) -> str:
        """Return the run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave for good; the others are told why, and do not wait for this host."""
        if not self._closed:
            self._closed = True
            self.client.leave(self.goodbye or "its launcher is done", ends_run=not self.goodbye)
            self.client.close()
            self._store = None
        return True

    def _start_service_anew(self) -> None:
        """Start the service again where it belongs here and has died; it finds its hosts."""
        if self._started and not self._closed:
            try:
                self._start_service()
            except LaunchError as error:
                self._say(f"the rendezvous cannot be started anew: {error}")

    def _start_service(self) -> None:
        """Start the service if it belongs here and is not there."""
        if not self._pod.endpoint.is_here:
            return
        self._started = True
        endpoint = self._pod.endpoint
        address = listening_address(endpoint)
        self._security.check_listening(address)
        directory = self._pod.tls_directory
        try:
            start_service(
                Orders(
                    host=address,
                    port=endpoint.port,
                    run_id=self._run_id,
                    token=self._pod.token,
                    tls_directory=str(directory) if directory else None,
                )
            )
        except PortTakenError:
            # By another launcher of this host, or a service that outlived its launcher, as a rule.
            holder = listener_on(endpoint.port)
            if holder is not None and not any(name in holder.command for name in _OURS):
                raise LaunchError(
                    f"port {endpoint.port} is taken by {holder}: end "
                    f"that, or give another port with --rdzv-endpoint on all hosts"
                ) from None
            _logger.info("port %d is taken: expecting the rendezvous there", endpoint.port)

    def _open_store(self, assigned: pb.Assigned) -> pb.Store:
        """Open the round's store, or connect to it.

        It is bound before it is told of, so that no port is picked and lost; a new round has a new
        one, with nothing of the last round's keys.
        """
        if assigned.rank:
            at = assigned.store
            self._store = TCPStore(
                at.address,
                at.port,
                is_master=False,
                timeout=_CONNECT_TIMEOUT,
                wait_for_workers=False,
            )
            self._store.set_timeout(_STORE_TIMEOUT)
            return at
        address = self._pod.address
        with _listen(address) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                address,
                port,
                is_master=True,
                timeout=_STORE_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # the store closes it
            )
        at = pb.Store(address=address, port=port)
        self.client.publish(at)
        return at


def _listen(address: str) -> socket.socket:
    """Listen on loopback if that is all the others use, else everywhere: behind NAT too."""
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
        )
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun makes its rendezvous with: the entry point ``torchrun.handlers``."""
    return _from_torchrun


def _from_torchrun(params: RendezvousParameters) -> RendezvousHandler:
    """Make the rendezvous that torchrun's options and TPU_LAUNCH_* variables ask for.

    Raises:
        LaunchError: they do not say where hosts meet.
    """
    environment = read_environment(current())
    arguments = {
        "nnodes": f"{params.min_nodes}:{params.max_nodes}",
        "rdzv-endpoint": params.endpoint,
    }
    if params.local_addr:
        arguments["local-addr"] = params.local_addr
    for name in ("join_timeout", "last_call_timeout"):
        if params.get(name) is not None:
            conf = arguments.get("rdzv-conf", "")
            arguments["rdzv-conf"] = f"{conf},{name}={params.get(name)}".strip(",")
    arguments = {name: text for name, text in arguments.items() if text}
    pod = choose_rendezvous(
        merge_settings(arguments, environment.settings), environment, scan_devices()
    )
    if pod is None:
        raise LaunchError("--rdzv-backend tpu wants --rdzv-endpoint HOST:PORT, also for one host")
    host = describe_host(
        pod,
        run_id=params.run_id,
        num_workers=int(current().get("LOCAL_WORLD_SIZE") or 1),
        max_restarts=_ANY_RESTARTS,
        stop_timeout=timedelta(seconds=30),
    )
    return PodRendezvous(pod, host, params.run_id, lambda text: _logger.warning("%s", text))
