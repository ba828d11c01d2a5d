"""The command line of ``tpu-launch doctor``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.text import Text

from tpu_dist.launch.console import NAME
from tpu_dist.launch.doctor import Finding, Level, Machine, examine, to_json
from tpu_dist.launch.environment import Environment
from tpu_dist.launch.parsing import dashes, new_app, parse_arguments
from tpu_dist.topology.source_environment import SKIP_METADATA
from tpu_dist.topology.source_metadata import MetadataServer

FAULT_STATUS = 1
_STYLES: Mapping[Level, str] = {Level.FINE: "green", Level.NOTE: "yellow", Level.FAULT: "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """How the findings are shown, and whether devices are tried."""

    json: bool
    all_reduce: bool


def run_doctor(argv: Sequence[str], environment: Environment) -> int:
    """Examine this host, print what was found, and return 1 if there is a fault, else 0.

    Raises:
        LaunchError: an option makes no sense.
    """
    config = parse_arguments(_app, argv, f"{NAME} doctor")
    if not isinstance(config, DoctorConfig):
        return int(config) if isinstance(config, int) else 0
    skips = environment.tpu.get(SKIP_METADATA, "").lower() in {"1", "true"}
    machine = Machine(
        environment=environment,
        metadata=None if skips else MetadataServer.from_environment(environment.tpu),
    )
    findings = examine(machine, all_reduce=config.all_reduce)
    if config.json:
        print(to_json(findings))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for finding in findings:
            console.print(_line(finding), soft_wrap=True)
    return FAULT_STATUS if any(each.level is Level.FAULT for each in findings) else 0


def _line(finding: Finding) -> Text:
    first, *rest = finding.text.splitlines()
    text = Text()
    text.append(f"{finding.level.value:<6}", _STYLES[finding.level])
    text.append(f"{finding.topic:<24}", "bold")
    text.append(first)
    for line in rest:
        text.append(f"\n{'':<30}{line}")
    return text


_app = new_app()


@_app.command(
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
def _doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    all_reduce: Annotated[
        bool,
        typer.Option(help="Whether to run two seconds of all_reduce on the devices."),
    ] = True,
) -> DoctorConfig:
    """Say what this host has, and what would keep a run from working on it.

    What each source says of the slice and what is taken, chips and who holds them, lock files,
    ports, the address for other hosts, versions, huge pages; then an all_reduce on the devices, or
    on the CPU stand-in. Exit status 1 if there is a fault.
    """
    return DoctorConfig(json=json, all_reduce=all_reduce)
