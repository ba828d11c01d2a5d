"""The PJRT client of this process: one client, one device, joined to the other ranks'."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tpu_dist.runtime.coordinator import CoordinatorConnection
from tpu_dist.runtime.environment import RuntimeConfig
from tpu_dist.runtime.transport_threads import run_behind_others, thread_ids
from tpu_dist.topology.chips import scan_devices
from tpu_dist.topology.discovery import discover
from tpu_dist.topology.errors import BringUpError
from tpu_dist.topology.tpu_environment import tpu_environment

_logger = logging.getLogger(__name__)


def choose_platform(config: RuntimeConfig, root: Path = Path("/")) -> str:
    """Return ``tpu`` or ``cpu``: what was asked for, else tpu where this host has chips."""
    if config.platform is not None:
        return config.platform
    return "tpu" if scan_devices(root).chips_on_bus else "cpu"


def prepare_tpu(
    config: RuntimeConfig, environ: Mapping[str, str], root: Path = Path("/")
) -> dict[str, str]:
    """Return the variables to set before libtpu loads.

    Raises:
        BringUpError: no chip is there, or the launcher did not say which process this is.
        TopologyError: the slice is not what the sources say, or the numbers of processes and of
            devices differ.
    """
    devices = scan_devices(root)
    if devices.kind is None or not devices.chips_usable:
        raise BringUpError(
            f"the platform is tpu, but this host has no usable TPU chip: {devices.chips_on_bus} "
            f"are on its PCI bus, {devices.chips_usable} have their files in /dev. Give the "
            f"container the chips' device files, or set TPU_DIST_PLATFORM=cpu for the CPU stand-in."
        )
    if devices.kind.devices_per_chip is None:
        raise BringUpError(
            f"how many devices a {devices.kind.name} chip has is not published, so processes "
            f"cannot be laid on them; this generation is not supported yet."
        )
    if config.local_rank is None or config.local_world_size is None:
        raise BringUpError(
            "LOCAL_RANK and LOCAL_WORLD_SIZE are not set: on a TPU host each process must know "
            "which device is its own. Start it with tpu-launch or torchrun, or set both."
        )
    return tpu_environment(
        discover(environ, root=root),
        local_rank=config.local_rank,
        local_world_size=config.local_world_size,
    )


def is_jax_initialised() -> bool:
    """Whether some code has already created JAX's backends in this process or its parent."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def create_client(
    platform: str,
    rank: int,
    world_size: int,
    connection: CoordinatorConnection | None,
    timeout: timedelta,
) -> tuple[Any, ...]:
    """Create the client and return every process's device, by the client's number of processes.

    `connection` is None for a world of one. JAX's own defaults are left alone but for the platform.

    Raises:
        BringUpError: the client did not come up, or some process has another number of devices
            than one.
    """
    import jax
    from jax._src import distributed

    # JAX takes the connection from here when it creates its client (jax 0.10; its public
    # jax.distributed.initialize cannot use a service that someone else started).
    state = distributed.global_state
    state.client = None if connection is None else connection.client
    state.process_id = rank
    state.num_processes = world_size
    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo" if world_size > 1 else None)
        minutes = max(1, int(timeout.total_seconds() // 60))
        jax.config.update("jax_cpu_get_global_topology_timeout_minutes", minutes)
    threads = thread_ids()
    try:
        with _client_threads(_CPU_CLIENT_THREADS):
            devices = jax.devices()
    except RuntimeError as error:
        raise BringUpError(
            f"rank {rank}: the {platform} client did not start: {error}. On a TPU host, look "
            f"whether another process holds the chip (tpu-info), and whether every rank got here."
        ) from error
    if platform == "cpu":
        run_behind_others(thread_ids() - threads)
    return one_device_a_rank(platform, devices, world_size)


# A collective that waits for its peers holds a thread of the CPU client's pool. By default it has
# one for each core: on 2 cores a third group that waits would keep all others from running.
_CPU_CLIENT_THREADS = 32


@contextlib.contextmanager
def _client_threads(count: int) -> Iterator[None]:
    """Give the CPU client that is made meanwhile `count` threads: jaxlib reads NPROC, then only."""
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


def one_device_a_rank(platform: str, devices: Any, world_size: int) -> tuple[Any, ...]:
    """Order `devices` by process; each must have exactly one, and each device a process.

    libtpu numbers processes by where they are in the slice; ranks may come in another order.

    Raises:
        BringUpError: which rank has how many, and the cure.
    """
    owned: dict[int, list[Any]] = {}
    for device in devices:
        owned.setdefault(device.process_index, []).append(device)
    crowded = {rank: len(mine) for rank, mine in owned.items() if len(mine) != 1}
    if crowded:
        raise BringUpError(
            f"one {platform} device a process is needed, but processes have: "
            + ", ".join(f"{rank}: {count} devices" for rank, count in sorted(crowded.items()))
            + ". Start one process per device (tpu-launch --nproc-per-node auto); on the CPU "
            "stand-in remove --xla_force_host_platform_device_count from XLA_FLAGS."
        )
    if sorted(owned) != list(range(world_size)):
        raise BringUpError(
            f"the slice has {len(devices)} {platform} devices and {world_size} ranks were started; "
            f"every device of a slice needs its rank. Start {len(devices)} processes."
        )
    return tuple(owned[rank][0] for rank in range(world_size))


def drop_client() -> None:
    """Destroy JAX's clients, so that another can be created; arrays that live on them die."""
    from jax._src import distributed
    from jax.extend.backend import clear_backends

    clear_backends()
    distributed.global_state.client = None


def release_dropped_clients() -> None:
    """Let dropped clients that nothing else uses any more end, and their threads with them."""
    import jax

    gc.collect()  # the last job's parts hold each other
    jax.clear_caches()  # JAX's own hold meshes and executables of the old devices
    gc.collect()


def apply_environment(variables: Mapping[str, str]) -> None:
    """Set `variables`, saying which ambient values they replace."""
    for name, value in variables.items():
        ambient = os.environ.get(name)
        if ambient is not None and ambient != value:
            _logger.info("%s=%s replaces the ambient %s", name, value, ambient)
        os.environ[name] = value
