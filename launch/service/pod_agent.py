"""The agent of one of several hosts: a round ends on all of them, and for the same reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs

from tpu_dist.launch.agent import HostAgent
from tpu_dist.launch.errors import RendezvousError
from tpu_dist.launch.failure import RoundFailure
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.failures import exit_message, failure_message
from tpu_dist.launch.service.handler import PodRendezvous


class PodAgent(HostAgent):
    """`HostAgent`, in step with the agents of the other hosts.

    A failure here is told to all; a failure elsewhere ends the workers here. When nobody has any
    left, the service says what had failed first and whether there is another round. Workers that
    end well wait for the others': until all have, a failure elsewhere starts them anew.

    Args:
        rendezvous: this host's membership.
        worker_environment: of each worker in the round, by its local rank.
        on_verdict: called before another round.
        others: as for HostAgent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        rendezvous: PodRendezvous,
        worker_environment: Callable[[pb.Assigned, int], Mapping[str, str]],
        on_verdict: Callable[[pb.Verdict], None],
        **others: Any,
    ) -> None:
        super().__init__(spec, logs_specs, on_restart=_told_by_verdict, **others)
        self.closed: pb.Closed | None = None
        self._pod = rendezvous
        self._worker_environment = worker_environment
        self._on_verdict = on_verdict

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Take the ranks from the service, without a word through the store."""
        assigned = self._assigned
        return [
            Worker(
                local_rank=local_rank,
                global_rank=assigned.first_worker + local_rank,
                role_rank=assigned.first_worker + local_rank,
                world_size=assigned.num_workers,
                role_world_size=assigned.num_workers,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env.update(self._worker_environment(self._assigned, local_rank))
        # Counts all starts, on all hosts alike, whatever the reason: logs are kept apart by it.
        worker_env["TORCHELASTIC_RESTART_COUNT"] = str(self._assigned.round - 1)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes
        end = self._pod.client.end_of_round()
        if processes is not None and processes.failures:
            return self._settle(worker_group)
        if isinstance(end, pb.Closed) and end.succeeded:
            self.closed = end
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        if end is not None:
            return self._settle(worker_group)
        if processes is not None and processes.all_ended:
            self._end_round()
            self._pod.client.done()
        return RunResult(state=WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        """Nothing: all hosts are done when the service says so."""

    def _settle(self, worker_group: WorkerGroup) -> RunResult:
        """End the round here, and do what the verdict says."""
        client, processes = self._pod.client, self._processes
        own: RoundFailure | None = None
        with self.signals.held():
            if processes is not None:
                if processes.failures:
                    client.failing(exit_message(processes.failures[0]))
                self._end_round()
                if processes.failures:
                    own = self._describe(processes)
        self.failure = own
        if self.undying:
            raise RendezvousError("workers of this host do not end, so it takes no further part")
        error = client.end_of_round()
        if isinstance(error, RendezvousError):
            raise error
        outcome = client.settle(failure_message(own) if own else None)
        if isinstance(outcome, pb.Closed):
            self.closed = outcome
            self._remaining_restarts = 0
        else:
            self._on_verdict(outcome)
            # The service counts for all hosts; the loop that we return to takes one off.
            used = outcome.restarts
            self._remaining_restarts = max(1, worker_group.spec.max_restarts - used + 1)
        return RunResult(state=WorkerState.FAILED)

    @property
    def _assigned(self) -> pb.Assigned:
        assigned = self._pod.assigned
        assert assigned is not None
        return assigned


def _told_by_verdict(failure: RoundFailure, restart: int) -> None:
    """Stand in for HostAgent's own word on a restart, which a verdict replaces."""
