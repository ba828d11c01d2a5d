"""Runs this host's part of a run on several hosts, start to end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.rendezvous.api import RendezvousError as ElasticError

from tpu_dist.launch.config import LaunchConfig
from tpu_dist.launch.console import say, show
from tpu_dist.launch.environment import current, without
from tpu_dist.launch.errors import RendezvousError
from tpu_dist.launch.failure import exit_status
from tpu_dist.launch.report import (
    failure_report,
    lost_host_report,
    restart_message,
    with_traceback,
)
from tpu_dist.launch.run import (
    hand_on_error_file,
    logs_specs,
    run_agent,
    say_signal,
    worker_environment,
    worker_spec,
)
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.failures import round_failure
from tpu_dist.launch.service.handler import PodRendezvous
from tpu_dist.launch.service.host import describe_host
from tpu_dist.launch.service.pod_agent import PodAgent
from tpu_dist.launch.signals import Interrupted
from tpu_dist.topology.discovery import Place
from tpu_dist.topology.tpu_environment import AMBIENT, host_environment, tpu_environment

_FAILED = 1


def run_pod(config: LaunchConfig, log_root: Path) -> int:
    """Take part in the run, and return the exit status: on all hosts that of the first failure.

    Raises:
        LaunchError: the service cannot be started here.
    """
    pod = config.pod
    assert pod is not None
    say(
        f"host {pod.name} at {pod.address} joins run {config.run_id!r} at {pod.endpoint} "
        f"({pod.endpoint.origin}), {_hosts(pod.min_hosts, pod.max_hosts)}"
    )
    host = describe_host(
        pod,
        run_id=config.run_id,
        num_workers=config.num_workers,
        max_restarts=config.max_restarts,
        stop_timeout=config.shutdown_timeout,
    )
    rendezvous = PodRendezvous(pod, host, config.run_id, say)
    try:
        return _run(config, log_root, rendezvous)
    finally:
        rendezvous.shutdown()


def _run(config: LaunchConfig, log_root: Path, rendezvous: PodRendezvous) -> int:
    variables = TpuVariables(config)
    with worker_environment(config) as extra, without(variables.stale):

        def environment(assigned: pb.Assigned, local_rank: int) -> Mapping[str, str]:
            if local_rank == 0:
                _say_round(assigned, config)
            return variables.of(assigned, local_rank)

        agent = PodAgent(
            worker_spec(config, rendezvous),
            logs_specs(config, log_root),
            rendezvous=rendezvous,
            worker_environment=environment,
            on_verdict=lambda verdict: say(_restart_text(verdict)),
            grace=config.shutdown_timeout,
            extra_environment=extra,
            log_line_prefix=config.log_line_prefix,
            on_signal=lambda signum, running: say_signal(config, signum, running),
        )
        try:
            interrupted = run_agent(agent)
        except (RendezvousError, ElasticError) as error:
            rendezvous.goodbye = f"it gave up: {error}"
            say(f"error: {error}")
            return _FAILED
        if interrupted is not None:
            return _end_by_signal(rendezvous, interrupted)
        if agent.closed is None or agent.closed.succeeded:
            return 0
        return _report(config, agent, agent.closed)


def _end_by_signal(rendezvous: PodRendezvous, interrupted: Interrupted) -> int:
    rendezvous.goodbye = f"its launcher was ended by {interrupted.signum.name}"
    return 128 + interrupted.signum


def _report(config: LaunchConfig, agent: PodAgent, closed: pb.Closed) -> int:
    sys.stdout.flush()
    if not closed.HasField("failure"):
        say(f"error: {closed.reason}")
        return _FAILED
    failure = closed.failure
    if failure.is_host:
        show(lost_host_report(failure.host, failure.message, restarts=closed.restarts))
        return _FAILED
    pod, told, elsewhere = config.pod, round_failure(failure), True
    if agent.failure is not None and pod is not None and failure.host == pod.name:
        told, elsewhere = agent.failure, False  # with its files
        hand_on_error_file(config, told)
    if failure.traceback:  # comes last, and once
        told = replace(told, root=replace(told.root, tail=()))
    text = failure_report(told, host=failure.host, restarts=closed.restarts, elsewhere=elsewhere)
    show(with_traceback(text, failure.traceback))
    return exit_status(told.root.end.exit_code)


class TpuVariables:
    """The TPU variables of this host's workers, from the membership that was agreed on.

    Attributes:
        stale: names of ambient variables, which do not reach the workers.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._place = config.pod.place if config.pod is not None and config.sets_tpu else None
        self._num_workers = config.num_workers
        self._before = {name: text for name, text in current().items() if name in AMBIENT}
        self._told = False
        self.stale = tuple(self._before) if self._place is not None else ()

    def of(self, assigned: pb.Assigned, local_rank: int) -> dict[str, str]:
        """Return the variables of one worker."""
        if self._place is None:
            return {}
        place = place_in_round(self._place, assigned)
        variables = tpu_environment(
            place, local_rank=local_rank, local_world_size=self._num_workers
        ) | host_environment(place)
        if not self._told:
            self._told = True
            for name, text in sorted(self._before.items()):
                if text != variables.get(name):
                    now = f"workers get {variables[name]}" if name in variables else "left out"
                    say(f"{name}={text} is in the environment; {now}, as the hosts agreed")
        return variables


def place_in_round(place: Place, assigned: pb.Assigned) -> Place:
    """Return where this host stands, with the addresses of the hosts that are in the round."""
    return replace(
        place, hostnames=tuple(assigned.addresses), coordinator=assigned.coordinator or None
    )


def _say_round(assigned: pb.Assigned, config: LaunchConfig) -> None:
    last = assigned.first_worker + config.num_workers - 1
    ranks = f"rank {last}" if config.num_workers == 1 else f"ranks {assigned.first_worker}-{last}"
    say(
        f"round {assigned.round}: host {assigned.rank} of {assigned.num_hosts}, {ranks} of "
        f"{assigned.num_workers}"
    )


def _restart_text(verdict: pb.Verdict) -> str:
    failure = verdict.failure
    if not verdict.HasField("failure"):
        return f"{verdict.cause}; starting all workers anew"
    count = {"restart": verdict.restarts, "max_restarts": verdict.max_restarts}
    if failure.is_host:
        return (
            f"host {failure.host} is lost: {failure.message}; starting all workers anew when all "
            f"hosts are there (restart {count['restart']} of {count['max_restarts']})"
        )
    return f"on host {failure.host}, {restart_message(round_failure(failure), **count)}"


def _hosts(low: int, high: int) -> str:
    return f"{low} hosts" if low == high else f"{low} to {high} hosts"
