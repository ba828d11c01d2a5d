"""Thousands of hosts in one process, against the real service in another: how long things take.

Each simulated host has the real client and a TCP connection of its own; it has no workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.__main__ import Orders
from tpu_dist.launch.service.membership import Membership
from tpu_dist.launch.service.process import raise_open_files, resident_megabytes, start_service
from tpu_dist.topology.system import System

_FILES_BESIDE_HOSTS = 64
_AT_A_TIME = 512
_RUN_ID = "simulation"
_STORE = pb.Store(address="simulated", port=1)
_MANY_RESTARTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """What is simulated.

    Attributes:
        num_hosts: how many hosts.
        system: what they are the hosts of; None: hosts without a TPU.
        losses: how many times a host is lost, and comes back.
        server_restarts: how many times the service is killed and started anew.
        deadline: seconds that each step may take.
    """

    num_hosts: int
    system: System | None = None
    losses: int = 1
    server_restarts: int = 0
    deadline: float = 120.0

    def __post_init__(self) -> None:
        if self.system is not None and self.system.num_hosts != self.num_hosts:
            raise LaunchError(
                f"{self.system} has {self.system.num_hosts} hosts, and --hosts says "
                f"{self.num_hosts}: leave one of them out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that was done, how long it took all hosts to know, and the service's memory."""

    what: str
    seconds: float
    server_megabytes: float


@dataclass(slots=True, eq=False)
class _Host:
    membership: Membership
    assigned: pb.Assigned | None = None
    broken_round: int = 0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Simulation:
    """A running simulation; see `simulate`."""

    config: SimulationConfig
    hosts: list[_Host] = field(default_factory=list)
    round: int = 0
    _ranked: int = 0
    _told: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, index: int, endpoint: str) -> None:
        """Make host number `index`; it does nothing until it is started."""
        membership = Membership(
            endpoint=endpoint,
            host=_description(index, self.config),
            on_message=lambda message: self._hear(host, message),
            first_patience=self.config.deadline,
            patience=self.config.deadline,
        )
        host = _Host(membership)
        self.hosts.append(host)

    def start(self, host: _Host) -> None:
        """Let a host join, as new."""
        host.membership.standing = pb.Standing()
        host.task = asyncio.create_task(host.membership.run())

    async def start_all(self) -> None:
        """Let all hosts join, as many at a time as one process can: real ones have their own."""
        connecting: deque[_Host] = deque()
        for host in self.hosts:
            self.start(host)
            connecting.append(host)
            while len(connecting) >= _AT_A_TIME:
                if connecting[0].membership.num_streams:
                    connecting.popleft()
                else:
                    await asyncio.sleep(0.001)

    async def reach(self, condition: Callable[[], bool], what: str) -> float:
        """Wait until `condition`, looked at whenever a host has heard something; return seconds."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.config.deadline):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise LaunchError(
                f"{what}: not within {self.config.deadline:g} s; {self._ranked} hosts are ranked, "
                f"{self._told} know that the round is broken"
            ) from None
        return time.perf_counter() - started

    def all_ranked(self, number: int) -> bool:
        """Whether all hosts are in round `number`."""
        return self.round == number and self._ranked == self.config.num_hosts

    def num_told(self) -> int:
        """Return how many hosts know that the round is broken."""
        return self._told

    def _hear(self, host: _Host, message: pb.ToHost) -> None:
        kind = message.WhichOneof("kind")
        me = host.membership
        if kind == "assigned":
            assigned = message.assigned
            if assigned.round > self.round:
                self.round, self._ranked, self._told = assigned.round, 0, 0
            host.assigned = assigned
            self._ranked += 1
            standing = _standing(pb.RUNNING, assigned)
            if assigned.rank == 0:
                standing.store.CopyFrom(_STORE)
                standing.members.extend(assigned.members)
            # As a real host would; only rank 0 must say so for the others to be told.
            me.standing = standing
            if assigned.rank == 0:
                me.tell(standing)
        elif kind == "broken" and host.assigned is not None:
            self._told += 1
            me.tell(_standing(pb.STOPPED, host.assigned))
        elif kind == "verdict" and host.assigned is not None:
            waiting = _standing(pb.WAITING, host.assigned)
            waiting.restarts = message.verdict.restarts
            me.tell(waiting)
        self._changed.set()


async def simulate(config: SimulationConfig, say: Callable[[Step], None]) -> list[Step]:
    """Run a simulation, and tell of each step as it is done.

    Raises:
        LaunchError: a step did not come to its end in time, or there are too few file descriptors.
    """
    limit = raise_open_files()
    if limit < config.num_hosts + _FILES_BESIDE_HOSTS:
        raise LaunchError(
            f"{config.num_hosts} hosts need as many open files, and the limit is {limit}: "
            f"raise it (ulimit -n)"
        )
    steps: list[Step] = []
    orders = Orders(host="127.0.0.1", port=0)
    async with _service(orders) as service:
        run = Simulation(config)
        for index in range(config.num_hosts):
            run.add(index, f"127.0.0.1:{service.port}")

        def note(what: str, seconds: float) -> None:
            steps.append(Step(what=what, seconds=seconds, server_megabytes=service.megabytes()))
            say(steps[-1])

        try:
            started = time.perf_counter()
            await run.start_all()
            await run.reach(lambda: run.all_ranked(1), "joining")
            seconds = time.perf_counter() - started
            note(f"{config.num_hosts} hosts join and are ranked", seconds)
            for _ in range(config.losses):
                await _lose_one(run, note)
            for _ in range(config.server_restarts):
                await _restart_service(run, service, note)
        finally:
            for host in run.hosts:
                if host.task is not None:
                    host.task.cancel()
            tasks = [host.task for host in run.hosts if host.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)
    return steps


async def _lose_one(run: Simulation, note: Callable[[str, float], None]) -> None:
    number, others = run.round, run.config.num_hosts - 1
    lost = run.hosts[run.config.num_hosts // 2]
    assert lost.task is not None
    lost.task.cancel()
    lost.assigned = None
    seconds = await run.reach(lambda: run.num_told() >= others, "telling of a lost host")
    note("a host is lost: all others are told", seconds)
    run.start(lost)
    seconds = await run.reach(lambda: run.all_ranked(number + 1), "ranking anew")
    note("it comes back: all are ranked anew", seconds)


async def _restart_service(
    run: Simulation, service: _Service, note: Callable[[str, float], None]
) -> None:
    before = [host.membership.num_streams for host in run.hosts]
    started = time.perf_counter()
    service.kill()
    await asyncio.to_thread(service.start)

    def all_are_back() -> bool:
        return all(
            host.membership.num_streams > count
            for host, count in zip(run.hosts, before, strict=True)
        )

    while not all_are_back():
        if time.perf_counter() - started > run.config.deadline:
            raise LaunchError("not all hosts found the service that was started anew")
        await asyncio.sleep(0.02)
    note("the service is killed and started anew: all are back", time.perf_counter() - started)
    if run.num_told():
        raise LaunchError("the round did not survive the service's restart")


@dataclass(slots=True)
class _Service:
    orders: Orders
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        orders = Orders(host=self.orders.host, port=self.port)
        self._process, ports = start_service(orders)
        self.port = ports["port"]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def megabytes(self) -> float:
        assert self._process is not None
        return resident_megabytes(self._process.pid)


@contextlib.asynccontextmanager
async def _service(orders: Orders) -> AsyncIterator[_Service]:
    service = _Service(orders)
    await asyncio.to_thread(service.start)
    try:
        yield service
    finally:
        service.kill()


def _description(index: int, config: SimulationConfig) -> pb.Host:
    host = pb.Host(
        run_id=_RUN_ID,
        name=f"tpu-worker-{index}.simulated.svc.cluster.local",
        incarnation=f"simulated-{index}",
        address=f"tpu-worker-{index}.simulated.svc.cluster.local",
        pid=1,
        num_workers=4,
        node_rank=-1,
        terms=pb.Terms(
            min_hosts=config.num_hosts,
            max_hosts=config.num_hosts,
            max_restarts=_MANY_RESTARTS,
            join_seconds=config.deadline,
            stop_seconds=config.deadline,
        ),
    )
    if config.system is not None:
        slice_ = config.system.slice
        index_of_slice, of_host = divmod(index, slice_.num_hosts)
        host.num_workers = slice_.devices_per_host
        host.place.CopyFrom(
            pb.Place(
                topology=str(config.system),
                slice=index_of_slice,
                host=of_host,
                coords=slice_.chips_of(of_host)[0],
                num_chips=slice_.chips_per_host,
            )
        )
    return host


def _standing(state: pb.State, assigned: pb.Assigned) -> pb.Standing:
    return pb.Standing(
        state=state,
        round=assigned.round,
        rank=assigned.rank,
        num_hosts=assigned.num_hosts,
        restarts=assigned.restarts,
    )
