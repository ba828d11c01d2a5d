"""Runs what a LaunchConfig says, start to end; from here on torch is imported."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousHandler

from tpu_dist.launch.agent import HostAgent
from tpu_dist.launch.config import LaunchConfig
from tpu_dist.launch.console import say, show
from tpu_dist.launch.environment import (
    OMP_NUM_THREADS,
    SIGNALS_TO_HANDLE,
    TOKEN,
    quiet_grpc,
    torchelastic_signals_disarmed,
    without,
)
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.failure import RoundFailure, exit_status
from tpu_dist.launch.guard import guarded
from tpu_dist.launch.rendezvous import STANDALONE, open_rendezvous
from tpu_dist.launch.report import failure_report, restart_message
from tpu_dist.launch.signals import Interrupted


def launch(config: LaunchConfig) -> int:
    """Start the workers, wait for them, and return the launcher's exit status.

    Blocks, and for the main thread only: it takes the ending signals while it runs. When it returns
    or raises, no worker is left.

    Raises:
        LaunchError: the log directory cannot be made; no worker was started then.
    """
    for notice in config.notices:
        say(notice)
    # Inherited as ignored, it would make the system forget how the workers ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _log_root(config) as root, without([TOKEN]):
        if config.pod is not None:
            quiet_grpc()
            from tpu_dist.launch.service.pod_run import run_pod

            return run_pod(config, root)
        rendezvous = open_rendezvous(STANDALONE, config.run_id)
        try:
            return _run(config, root, rendezvous)
        finally:
            rendezvous.shutdown()


def _run(config: LaunchConfig, log_root: Path, rendezvous: RendezvousHandler) -> int:
    with worker_environment(config) as environment:
        restarts = 0

        def on_restart(failure: RoundFailure, restart: int) -> None:
            nonlocal restarts
            restarts = restart
            say(restart_message(failure, restart=restart, max_restarts=config.max_restarts))

        agent = HostAgent(
            worker_spec(config, rendezvous),
            logs_specs(config, log_root),
            grace=config.shutdown_timeout,
            extra_environment=environment,
            log_line_prefix=config.log_line_prefix,
            on_restart=on_restart,
            on_signal=lambda signum, running: say_signal(config, signum, running),
        )
        interrupted = run_agent(agent)
        failure = agent.failure
        if failure is not None:
            sys.stdout.flush()
            show(failure_report(failure, host=socket.gethostname(), restarts=restarts))
            hand_on_error_file(config, failure)
        if interrupted is not None:
            return 128 + interrupted.signum
        return exit_status(failure.root.end.exit_code) if failure else 0


def run_agent(agent: HostAgent) -> Interrupted | None:
    """Run an agent to its end; return what interrupted it, if a signal did."""
    try:
        with agent.signals, closing(agent):
            agent.run()
    except Interrupted as error:
        return error
    return None


@contextmanager
def worker_environment(config: LaunchConfig) -> Iterator[dict[str, str]]:
    """Give the variables of all workers beside torchelastic's."""
    with torchelastic_signals_disarmed() as signals_of_workers:
        environment = {SIGNALS_TO_HANDLE: signals_of_workers}
        if config.omp_num_threads is not None:
            environment[OMP_NUM_THREADS] = str(config.omp_num_threads)
        yield environment


def say_signal(config: LaunchConfig, signum: signal.Signals, running: int) -> None:
    """Say that a signal ends the workers."""
    limit = f"{config.shutdown_timeout.total_seconds():g} s"
    say(
        f"{signum.name}: asking {running} running worker{'s' if running > 1 else ''} to "
        f"end; killed after {limit}, or at a second signal"
    )


def worker_spec(config: LaunchConfig, rendezvous: RendezvousHandler) -> WorkerSpec:
    """Return torchelastic's description of the workers."""
    entrypoint, *arguments = guarded(config.entry.command(config.python))
    return WorkerSpec(
        role=config.role,
        local_world_size=config.num_workers,
        entrypoint=entrypoint,
        # torchelastic expands ${local_rank} and $$ in arguments; these shall arrive as they are.
        args=tuple(argument.replace("$", "$$") for argument in arguments),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval.total_seconds(),
    )


def logs_specs(config: LaunchConfig, root: Path) -> DefaultLogsSpecs:
    """Return torchelastic's description of the workers' logs."""
    if any(config.tee.values()) and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # tee'd lines at once, also into a pipe
    ranks = config.local_ranks_filter
    return DefaultLogsSpecs(
        log_dir=str(root),
        redirects={rank: Std(streams) for rank, streams in config.redirects.items()},
        tee={rank: Std(streams) for rank, streams in config.tee.items()},
        local_ranks_filter=set(ranks) if ranks is not None else None,
    )


@contextmanager
def _log_root(config: LaunchConfig) -> Iterator[Path]:
    """Give a directory for logs and error files; a temporary one stays only if it has logs."""
    if config.log_dir is not None:
        try:
            config.log_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=config.log_dir):
                pass
        except OSError as error:
            raise LaunchError(f"--log-dir {str(config.log_dir)!r}: {error.strerror}") from error
        yield config.log_dir
        return
    root = Path(tempfile.mkdtemp(prefix="tpu_launch_"))
    if config.writes_logs:
        say(f"logs are in {root}; choose the place with --log-dir")
    try:
        yield root
    finally:
        if not config.writes_logs:
            shutil.rmtree(root, ignore_errors=True)


def hand_on_error_file(config: LaunchConfig, failure: RoundFailure) -> None:
    """Copy the root cause's error file to where whoever started the launcher looks for it."""
    if config.error_file is None or failure.root.error_file is None:
        return
    try:
        shutil.copyfile(failure.root.error_file, config.error_file)
    except OSError as error:
        say(f"could not copy the error file to {config.error_file}: {error.strerror}")
