"""The agent of this host: torchelastic's, with our own supervision of the processes.

torchelastic makes the workers' environment, logs and rounds. What it does not do well enough is
replaced here: a failure's grace is the configured one and not 30 s always, the order of failures is
that of the workers' ends and not that of a poll, a whole process group is ended and not its leader
alone, and a signal cannot come between the start of two workers.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from tpu_dist.launch.failure import RoundFailure, describe_failure
from tpu_dist.launch.processes import Worker, WorkerProcesses
from tpu_dist.launch.signals import EndingSignals

_logger = logging.getLogger(__name__)


class HostAgent(LocalElasticAgent):
    """Starts the workers of this host, and watches and ends them; `run` blocks until all ended.

    For the main thread. ``run`` returns a RunResult whose state is SUCCEEDED or FAILED (``failure``
    then says why), or raises `Interrupted`, with no worker left, where a signal ended it;
    ``failure`` is set then too if the workers were being ended because of one.

    Args:
        spec: torchelastic's description of the workers.
        logs_specs: torchelastic's description of their logs.
        grace: what workers that are asked to end get before SIGKILL.
        extra_environment: variables for the workers beside torchelastic's.
        log_line_prefix: template of the prefix of tee'd lines; None is torchelastic's.
        on_restart: called with the failure when all workers are about to be started anew, and the
            number of that restart.
        on_signal: called with the signal and the number of running workers, once, before the
            workers are ended because of it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        grace: timedelta,
        extra_environment: Mapping[str, str],
        log_line_prefix: str | None,
        on_restart: Callable[[RoundFailure, int], None],
        on_signal: Callable[[signal.Signals, int], None],
    ) -> None:
        super().__init__(spec, logs_specs, log_line_prefix_template=log_line_prefix)
        self.failure: RoundFailure | None = None
        self.undying = False  # whether processes outlived SIGKILL
        self.signals = EndingSignals(again=self._kill)
        self._grace = grace
        self._extra_environment = extra_environment
        self._on_restart = on_restart
        self._on_signal = on_signal
        self._signal_told = False
        self._processes: WorkerProcesses | None = None

    def close(self) -> None:
        """End whatever workers are left; none are after `run`, unless it failed unexpectedly."""
        self._end_round()

    def _kill(self) -> None:
        if self._processes is not None:
            self._processes.kill()

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env.update(self._extra_environment)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self.signals.held():
            self.failure = None
            pids: dict[int, Any] = super()._start_workers(worker_group)
            context = self._pcontext
            assert isinstance(context, SubprocessContext)
            self._processes = WorkerProcesses(
                Worker(
                    rank=worker_group.workers[local_rank].global_rank,
                    local_rank=local_rank,
                    process=handler.proc,
                )
                for local_rank, handler in context.subprocess_handlers.items()
            )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes
        assert processes is not None
        if processes.failures:
            with self.signals.held():
                self._end_round()
                self.failure = self._describe(processes)
            if self._remaining_restarts > 0:
                restarts = worker_group.spec.max_restarts - self._remaining_restarts
                self._on_restart(self.failure, restarts + 1)
            return RunResult(state=WorkerState.FAILED)
        if processes.all_ended:
            self._end_round()
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_round(death_sig)

    def _end_round(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """End what is left of the workers, by the signal that ends us if one does."""
        with self.signals.held():
            processes, received = self._processes, self.signals.received
            if processes is not None:
                running = len(self._worker_group.workers) - len(processes.exits)
                if received is not None and running and not self._signal_told:
                    self._signal_told = True
                    self._on_signal(received, running)
                try:
                    processes.stop(received or signum, self._grace)
                except TimeoutError as error:
                    _logger.error("%s; giving up on them", error)
                    self._remaining_restarts = 0  # they may still hold the TPU
                    self.undying = True
                self._processes = None
            # Nobody is left to be signalled or waited for: this ends the tee and closes the files.
            super()._shutdown(timeout=0)

    def _describe(self, processes: WorkerProcesses) -> RoundFailure:
        context = self._pcontext
        assert context is not None
        return describe_failure(
            processes.exits,
            error_files={rank: Path(file) for rank, file in context.error_files.items()},
            logs={
                rank: tuple(
                    Path(files[rank]) for files in (context.stdouts, context.stderrs) if files[rank]
                )
                for rank in context.stdouts
            },
        )
