"""The Runtime: what this process shares with the other ranks of its job, from init to exit."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tpu_dist.runtime.channel import Channel
from tpu_dist.runtime.client import (
    apply_environment,
    choose_platform,
    create_client,
    drop_client,
    is_jax_initialised,
    one_device_a_rank,
    prepare_tpu,
)
from tpu_dist.runtime.coordinator import (
    CoordinatorAddress,
    CoordinatorConnection,
    CoordinatorProcess,
)
from tpu_dist.runtime.environment import RuntimeConfig
from tpu_dist.runtime.forks import client_started, refuse_forked_child
from tpu_dist.runtime.host_memory import keep_freed_memory
from tpu_dist.runtime.job_topology import find_rank_map, stand_in_rank_map
from tpu_dist.runtime.transport_sockets import listening_ports
from tpu_dist.topology.errors import BringUpError, TopologyError
from tpu_dist.topology.rank_map import RankMap

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Runtime:
    """One PJRT client, its device, and the way to the other ranks' processes.

    Made by start_runtime(); there is at most one a process, since there is at most one PJRT client.
    """

    platform: str
    rank: int
    world_size: int
    devices: tuple[Any, ...]  # every rank's device, by rank
    session: str
    channel: Channel
    connection: CoordinatorConnection | None
    transport_ports: frozenset[int]  # where peers' transports reach this process's
    topology: str | None = None  # as it was asked for
    rank_map: RankMap | None = None  # where the ranks stand, if that is somewhere and known
    process_id: int = field(default_factory=os.getpid)
    healthy: bool = True  # False once a transport was cut: the next init starts afresh
    at_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def device(self) -> Any:
        """The one device of this process."""
        return self.devices[self.rank]

    def close(self) -> None:
        """Stop what runs for this runtime and leave the job; its arrays die with it."""
        atexit.unregister(self.close_at_exit)
        self.close_at_exit()
        self.at_close.clear()  # what they belong to holds this runtime
        if self.connection is not None:
            drop_client()
            self.connection.close()

    def close_at_exit(self) -> None:
        """Leave no thread in a collective when the interpreter ends: that aborts the process."""
        if self.process_id == os.getpid():
            for callback in reversed(self.at_close):
                callback()
            self.channel.close()


# The PJRT client is one a process by nature; so is its owner.
_current: Runtime | None = None


def current_runtime() -> Runtime | None:
    """The runtime of this process, or None before the first init_process_group."""
    return _current


def start_runtime(
    store: Any, *, rank: int, world_size: int, timeout: timedelta, config: RuntimeConfig
) -> Runtime:
    """Start, or take up again, the runtime of this process. Collective over all ranks of `store`.

    Args:
        store: a c10d Store that all ranks share; used under the prefix it comes with.
        rank: this process's rank.
        world_size: number of ranks.
        timeout: for the whole of it.
        config: what the environment says.

    Raises:
        BringUpError: what is in the way, and the cure.
        TopologyError: the slice and the ranks do not fit.
    """
    global _current
    deadline = time.monotonic() + timeout.total_seconds()
    refuse_forked_child()
    old = _current
    if old is not None:
        asked = (rank, world_size, config.topology)
        usable = old.healthy and (old.rank, old.world_size, old.topology) == asked
        _refuse_other_platform(old, config)
    else:
        usable = False
    store.set(f"session/{rank}", f"{old.session}" if usable and old is not None else "-")
    if rank == 0:
        keys = [f"session/{other}" for other in range(world_size)]
        with contextlib.suppress(RuntimeError):
            store.wait(keys, _left(deadline))
            sessions = {bytes(store.get(key)).decode() for key in keys}
            store.set("decision", "new" if len(sessions) > 1 or "-" in sessions else min(sessions))
    _await(store, "decision", "session", world_size, deadline)
    decision = bytes(store.get("decision")).decode()
    if decision != "new" and old is not None:
        return old
    if old is not None:
        old.close()
        _current = None
    _current = _start(store, rank, world_size, deadline, config)
    return _current


def _start(
    store: Any, rank: int, world_size: int, deadline: float, config: RuntimeConfig
) -> Runtime:
    platform = choose_platform(config)
    if platform == "cpu" and config.topology is not None:
        stand_in_rank_map(config.topology, world_size)  # refuses what does not fit, at once
    host = _own_address(config)
    coordinator = CoordinatorProcess(host, world_size) if rank == 0 and world_size > 1 else None
    try:
        ready_made = _devices_of_users_jax(platform, rank, world_size)
    except BringUpError:
        if coordinator is not None:
            coordinator.kill()
        raise
    if platform == "cpu" and not config.tuned_malloc:
        keep_freed_memory()
    if platform == "tpu" and ready_made is None:
        apply_environment(prepare_tpu(config, os.environ))
    if rank == 0:
        address = ""
        if coordinator is not None and ready_made is None:
            address = str(coordinator.address(_left(deadline)))
        elif coordinator is not None:
            coordinator.kill()
        store.set("job", f"{secrets.token_hex(16)}|{address}")
    session, _, address = _get(store, "job", deadline, "rank 0 to start the job").partition("|")
    channel = Channel(rank=rank, host=host, token=session)
    connection = None
    try:
        addresses = _meet(store, rank, world_size, channel.address, deadline)
        channel.resolve = addresses.__getitem__
        if address:
            coordinator_address = CoordinatorAddress.parse(address)
            connection = CoordinatorConnection(coordinator_address, rank, _left(deadline))
        older_ports = frozenset() if ready_made else listening_ports()
        devices = ready_made or create_client(
            platform, rank, world_size, connection, _left(deadline)
        )
        if ready_made is None and world_size > 1:
            processes = _exchange(store, "process", rank, world_size, _process_index(), deadline)
            devices = tuple(devices[process] for process in processes)
        rank_map = find_rank_map(platform, devices, config.topology)
    except (BringUpError, TopologyError):
        channel.close()
        raise
    runtime = Runtime(
        platform=platform,
        rank=rank,
        world_size=world_size,
        devices=devices,
        session=session,
        channel=channel,
        connection=connection,
        transport_ports=listening_ports() - older_ports - {channel.address[1]},
        topology=config.topology,
        rank_map=rank_map,
    )
    client_started()
    atexit.register(runtime.close_at_exit)
    _logger.info("rank %d of %d on %s", rank, world_size, devices[rank])
    return runtime


def _meet(
    store: Any, rank: int, world_size: int, own: tuple[str, int], deadline: float
) -> list[tuple[str, int]]:
    """Tell all ranks where our channel listens, and learn where theirs do.

    Every rank must get this far before any connects: jaxlib ends the processes that wait for one
    in vain. And the store is not needed afterwards: the process that serves it may die.

    Raises:
        BringUpError: names the ranks that did not come.
    """
    everybody = _exchange(store, "here", rank, world_size, own, deadline)
    return [(host, port) for host, port in everybody]


def _exchange(
    store: Any, name: str, rank: int, world_size: int, own: Any, deadline: float
) -> list[Any]:
    """Tell all ranks a value, and learn theirs, by rank.

    Raises:
        BringUpError: names the ranks that did not come.
    """
    keys = [f"{name}/{other}" for other in range(world_size)]
    store.set(f"{name}/{rank}", json.dumps(own))
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait(keys, _left(deadline))
            store.set(f"all/{name}", json.dumps([json.loads(store.get(key)) for key in keys]))
    _await(store, f"all/{name}", name, world_size, deadline)
    values: list[Any] = json.loads(store.get(f"all/{name}"))
    return values


def _process_index() -> int:
    """Return this process's number as its client counts: libtpu goes by places in the slice."""
    import jax

    return jax.process_index()


def _await(store: Any, key: str, steps: str, world_size: int, deadline: float) -> None:
    """Wait for `key`, which rank 0 sets when every rank r has set `steps`/r.

    Raises:
        BringUpError: names the ranks that have not.
    """
    left = _left(deadline)
    with contextlib.suppress(RuntimeError):
        store.wait([key], left)
        return
    missing = [rank for rank in range(world_size) if not store.check([f"{steps}/{rank}"])]
    raise BringUpError(
        f"waited {left.total_seconds():.0f} s for ranks {missing} to call init_process_group, in "
        f"vain. Look at their logs: they have failed, or were never started."
    )


def _devices_of_users_jax(platform: str, rank: int, world_size: int) -> tuple[Any, ...] | None:
    """The devices of a JAX that was initialised before us, if of use; None if there is none."""
    if not is_jax_initialised():
        return None
    import jax

    found = (jax.default_backend(), jax.process_count(), jax.process_index())
    if found == (platform, world_size, rank):
        return one_device_a_rank(platform, jax.devices(), world_size)
    raise BringUpError(
        f"JAX was initialised in this process before init_process_group, as process {found[2]} of "
        f"{found[1]} on {found[0]}; rank {rank} of {world_size} on {platform} is needed, and a "
        f"process has one PJRT client. Call init_process_group before the first JAX computation "
        f"(tensors on 'tpu', jax.devices(), jnp arrays at import time ...), or give each rank its "
        f"own jax.distributed.initialize."
    )


def _refuse_other_platform(old: Runtime, config: RuntimeConfig) -> None:
    wanted = choose_platform(config)
    if old.platform != wanted:
        raise BringUpError(
            f"this process runs on {old.platform}, and {wanted} is asked for now; a process keeps "
            f"its platform. Start another process, or leave TPU_DIST_PLATFORM alone."
        )


def _own_address(config: RuntimeConfig) -> str:
    """The address under which the other hosts reach this one."""
    if config.host is not None:
        return config.host
    master = config.master_address or "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # sends nothing: it only picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BringUpError(
            f"no route from here to MASTER_ADDR={master}: {error}. Correct it, or set "
            f"TPU_DIST_HOST to the address that the other hosts reach this one by."
        ) from error


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _get(store: Any, key: str, deadline: float, awaited: str) -> str:
    left = _left(deadline)
    try:
        store.wait([key], left)
    except RuntimeError as error:
        raise BringUpError(
            f"waited {left.total_seconds():.0f} s for {awaited}, in vain ({error}). Look at that "
            f"rank's log: it has failed, or was never started."
        ) from error
    return bytes(store.get(key)).decode()
