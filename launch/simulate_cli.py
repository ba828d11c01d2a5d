"""The command line of ``tpu-launch simulate``: thousands of hosts against the real service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tpu_dist.launch.console import NAME
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.parsing import dashes, new_app, parse_arguments
from tpu_dist.topology.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """What is simulated, and where the figures go."""

    hosts: int | None
    topology: str | None
    losses: int
    server_restarts: int
    deadline: float
    json: Path | None


def run_simulate(argv: Sequence[str]) -> int:
    """Simulate, print each step as it is done, and return the exit status.

    Raises:
        LaunchError: an option makes no sense, or a step did not come to its end in time.
        TopologyError: there is no such topology.
    """
    config = parse_arguments(_app, argv, f"{NAME} simulate")
    if not isinstance(config, SimulateConfig):
        return int(config) if isinstance(config, int) else 0
    system = System.parse(config.topology) if config.topology else None
    num_hosts = config.hosts or (system.num_hosts if system is not None else None)
    if num_hosts is None:
        raise LaunchError(f"give --hosts or --topology (see {NAME} simulate --help)")
    import asyncio

    from tpu_dist.launch.service.simulation import SimulationConfig, Step, simulate

    simulation = SimulationConfig(
        num_hosts=num_hosts,
        system=system,
        losses=config.losses,
        server_restarts=config.server_restarts,
        deadline=config.deadline,
    )
    print(f"{'seconds':>8}  {'service, MB':>11}  step")

    def show(step: Step) -> None:
        print(f"{step.seconds:8.3f}  {step.server_megabytes:11.0f}  {step.what}", flush=True)

    steps = asyncio.run(simulate(simulation, show))
    if config.json is not None:
        rows = [asdict(step) for step in steps]
        config.json.write_text(json.dumps({"hosts": num_hosts, "steps": rows}, indent=1) + "\n")
    return 0


_app = new_app()


@_app.command(
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
def _simulate(
    hosts: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=16_384, help="Default: those of the topology."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What they are hosts of: v6e:16x16*32. Default: no TPU."),
    ] = None,
    losses: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often a host is lost, and comes back.")
    ] = 1,
    server_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often the service is killed.")
    ] = 0,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="What each step may take.")
    ] = 120.0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures there, too.")
    ] = None,
) -> SimulateConfig:
    """Let thousands of simulated hosts join, be lost and come back, on this machine.

    The service is the real one, in a process of its own; each host has the real client and a
    connection. They have no workers.
    """
    return SimulateConfig(
        hosts=hosts,
        topology=topology,
        losses=losses,
        server_restarts=server_restarts,
        deadline=deadline,
        json=json,
    )
