"""The command line of tpu-launch: options before the script, and all after it left to the script.

Nothing here imports torch before the arguments are parsed and found to be good.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from tpu_dist.launch.config import build_config
from tpu_dist.launch.console import NAME, say
from tpu_dist.launch.environment import read_environment
from tpu_dist.launch.parsing import dashes, new_app, parse_arguments
from tpu_dist.topology.errors import TpuDistError

USAGE_ERROR_STATUS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A parsed command line: the settings that were given, as text, and what is to be run."""

    settings: Mapping[str, str]
    target: str
    arguments: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run tpu-launch and return its exit status.

    0 if all workers ended with 0; 2 for a run that cannot be started as asked; 128 + N where signal
    N ended the launcher; else the status of the worker that failed first (128 + N if by a signal).

    Example:
        >>> main(["--nproc-per-node", "2", "train.py", "--steps", "10"])  # doctest: +SKIP
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in _COMMANDS:
            return _COMMANDS[argv[0]](argv[1:])
        command_line = parse(argv)
        if isinstance(command_line, int):
            return command_line
        config = build_config(
            command_line.settings,
            command_line.target,
            command_line.arguments,
            read_environment(os.environ),
        )
        from tpu_dist.launch.run import launch

        return launch(config)
    except TpuDistError as error:
        say(f"error: {error}")
        return USAGE_ERROR_STATUS
    except (KeyboardInterrupt, typer.Abort):  # before the workers exist; later launch() sees to it
        return 130


def parse(argv: Sequence[str]) -> CommandLine | int:
    """Parse a command line.

    Returns:
        What it says, or the exit status where that was all: --help and --version have been shown.

    Raises:
        LaunchError: an option that is unknown, not available or without its value, or no script.
    """
    result = parse_arguments(_app, argv, NAME)
    if isinstance(result, CommandLine):
        return result
    return result if isinstance(result, int) else 0


def _run_topo(argv: Sequence[str]) -> int:
    from tpu_dist.launch.topo_cli import run_topo

    return run_topo(argv, os.environ)


def _run_plan(argv: Sequence[str]) -> int:
    from tpu_dist.launch.plan_cli import run_plan_command

    return run_plan_command(argv)


def _run_serve(argv: Sequence[str]) -> int:
    from tpu_dist.launch.serve_cli import run_serve

    return run_serve(argv, read_environment(os.environ))


def _run_doctor(argv: Sequence[str]) -> int:
    from tpu_dist.launch.doctor_cli import run_doctor

    return run_doctor(argv, read_environment(os.environ))


def _run_simulate(argv: Sequence[str]) -> int:
    from tpu_dist.launch.environment import quiet_grpc
    from tpu_dist.launch.simulate_cli import run_simulate

    quiet_grpc()
    return run_simulate(argv)


# What the first argument may be other than an option or a script; a script of that name is ./topo.
_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "topo": _run_topo,
    "plan": _run_plan,
    "doctor": _run_doctor,
    "serve": _run_serve,
    "simulate": _run_simulate,
}

_app = new_app()


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"{NAME} {version('tpu-dist')}")
        raise typer.Exit


@_app.command(
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": dashes,
        "help_option_names": ["-h", "--help"],
    },
    epilog="Each option may come from the environment instead, as in TPU_LAUNCH_MAX_RESTARTS=3; "
    "the command line wins. Options may be written with underscores. "
    "tpu-launch doctor examines this host, topo draws a slice, plan compiles for one, serve runs "
    "the rendezvous alone, simulate tries it with thousands of hosts: see their --help.",
)
def _command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="What each worker runs.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Passed to it untouched.")
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Workers on this host: a number, auto (one per TPU device; 2 without a TPU), "
            "tpu (the same, and an error without a TPU) or cpu (one per core). Default: 1.",
        ),
    ] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option(metavar="N", help="Restarts of all workers after a failure. Default: 0."),
    ] = None,
    module: Annotated[
        bool | None, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = None,
    no_python: Annotated[
        bool | None, typer.Option("--no-python", help="SCRIPT is a command, run without python.")
    ] = None,
    run_path: Annotated[
        bool | None,
        typer.Option("--run-path", help="Run SCRIPT by runpy.run_path and record what it raises."),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where logs go. Default: a temporary directory."),
    ] = None,
    redirects: Annotated[
        str | None,
        typer.Option(
            "--redirects",
            "-r",
            metavar="STREAMS",
            help="Streams that go to files only: 1 stdout, 2 stderr, 3 both, "
            "or by local rank as in 0:3,1:2. Default: 0.",
        ),
    ] = None,
    tee: Annotated[
        str | None,
        typer.Option(
            "--tee",
            "-t",
            metavar="STREAMS",
            help="Streams that go to files and, with a prefix, to the terminal. Default: 0.",
        ),
    ] = None,
    local_ranks_filter: Annotated[
        str | None,
        typer.Option(metavar="RANKS", help="Local ranks that may write to the terminal: 0,2."),
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="NAME", help="The workers' role. Default: default.")
    ] = None,
    monitor_interval: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="How often to look at the workers. Default: 0.1."),
    ] = None,
    shutdown_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="What workers get to end by themselves before SIGKILL. Default: 30.",
        ),
    ] = None,
    standalone: Annotated[
        bool | None, typer.Option("--standalone", help="One host alone, whatever it is part of.")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Hosts: a number, MIN:MAX, or auto (those of the slice). Default: auto.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where hosts meet. Default: beside the slice's first host, port 8471.",
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="The run's name, the same on all hosts. Default: date and time on one host, "
            "else the JobSet's name or none.",
        ),
    ] = None,
    rdzv_conf: Annotated[
        str | None,
        typer.Option(
            metavar="K=V", help="join_timeout and last_call_timeout, in seconds, with commas."
        ),
    ] = None,
    rdzv_backend: Annotated[str | None, typer.Option(hidden=True)] = None,
    node_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="This host's name. Default: its hostname.")
    ] = None,
    node_rank: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="This host's rank. Default: by the topology, else the name."
        ),
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR", help="By which others reach this host. Default: of the route to them."
        ),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(metavar="HOST", help="As HOST in --rdzv-endpoint.")
    ] = None,
    master_port: Annotated[
        str | None, typer.Option(metavar="PORT", help="As PORT in --rdzv-endpoint.")
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The job's secret, the same on all hosts."),
    ] = None,
    tls_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="ca.crt, tls.crt and tls.key, for TLS on both sides."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> CommandLine:
    """Start a PyTorch program on the TPU devices of this host, one worker process for each.

    Made for torchrun's users: tpu-launch --nproc-per-node auto train.py ARGS; the same command on
    every host of a slice.
    """
    given = {
        "nproc-per-node": nproc_per_node,
        "max-restarts": max_restarts,
        "module": module,
        "no-python": no_python,
        "run-path": run_path,
        "log-dir": log_dir,
        "redirects": redirects,
        "tee": tee,
        "local-ranks-filter": local_ranks_filter,
        "role": role,
        "monitor-interval": monitor_interval,
        "shutdown-timeout": shutdown_timeout,
        "standalone": standalone,
        "rdzv-id": rdzv_id,
        "nnodes": nnodes,
        "rdzv-backend": rdzv_backend,
        "rdzv-endpoint": rdzv_endpoint,
        "rdzv-conf": rdzv_conf,
        "node-name": node_name,
        "node-rank": node_rank,
        "local-addr": local_addr,
        "master-addr": master_addr,
        "master-port": master_port,
        "token-file": token_file,
        "tls-dir": tls_dir,
    }
    return CommandLine(
        settings={name: str(value) for name, value in given.items() if value is not None},
        target=script,
        arguments=tuple(arguments or ()),
    )
