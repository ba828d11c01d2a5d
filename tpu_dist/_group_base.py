"""What a process group is, verbs apart: who is in it, its name, its timeouts, its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpu_dist._job import Job
from tpu_dist._recorder import VerbTime
from tpu_dist._work import CoalescedWork, Work
from tpu_dist.collectives.operations import Operation
from tpu_dist.collectives.siblings import Siblings
from tpu_dist.collectives.task import Call, Owner, Task
from tpu_dist.errors import CollectiveError
from tpu_dist.runtime.device import calls

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GroupOptions:
    """What torch copies from a parent group when it splits one."""

    timeout: timedelta


class GroupBase(dist.ProcessGroup):
    """Identity and lifetime of a group; c10d's C++ half knows its rank and size alone.

    torch asks a Backend for much of this, and a Python group has none: so it answers itself.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(
        self,
        job: Job,
        store: Any,
        ranks: Sequence[int],
        timeout: timedelta,
        name: str,
        description: str = "undefined",
    ) -> None:
        """Make the group known to itself; nothing is sent.

        Args:
            job: of this process.
            store: of the group.
            ranks: global rank of each group rank.
            timeout: for its calls.
            name: the same on all ranks.
            description: for people.
        """
        ranks = tuple(ranks)
        super().__init__(ranks.index(job.rank), len(ranks))  # type: ignore[call-arg]
        self._job = job
        self._store = store
        self._ranks = ranks
        self._index = ranks.index(job.rank)
        self._timeout = timeout
        self._name = name
        self._uid = f"{job.epoch}/{name}"
        self._description = description
        self._sequence = 0
        self._lane = job.engine.lane(ranks)
        self._siblings: Siblings | None = None
        self._ended: str | None = None
        self._coalescing: list[Work] | None = None

    # --- names: Python calls the first spelling, C++ the second

    @property
    def group_name(self) -> str:
        """The name, unique among the groups of the job."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The description."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: D102, N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: D102, N802
        return self._description

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815

    def name(self) -> str:
        """The backend's name."""
        return "tpu_dist"

    def getBackendName(self) -> str:  # noqa: N802
        """The backend's name, as C++ asks for it."""
        return "tpu_dist"

    # --- what torch asks a group's backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("tpu")]

    def _get_backend(self, device: torch.device) -> GroupBase:
        return self

    @property
    def options(self) -> GroupOptions:
        """A copy of the group's options."""
        return GroupOptions(self._timeout)

    def get_group_store(self) -> Any:
        """The store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        if timeout <= timedelta(0):
            raise ValueError(f"a timeout must be positive, got {timeout}")
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def get_ranks(self) -> list[int]:
        """Global rank of each group rank."""
        return list(self._ranks)

    def verb_times(self) -> dict[str, VerbTime]:
        """Calls and seconds for each verb in this process since the start, all groups together."""
        return dict(self._job.recorder.verb_times())

    # --- its end

    def shutdown(self) -> None:
        """Take no more calls; those under way go on to their end.

        What was waited for is done when this returns, or has failed: where nobody has touched its
        outputs, the failure is logged. It is not raised, as the rest must be taken down too.
        """
        self._ended = self._ended or "was destroyed"
        finish_calls(self._uid)

    def abort(self) -> None:
        """Fail what is under way, here and on the group's other ranks, and take no more calls."""
        self._ended = self._ended or "was aborted"
        if self.size() > 1:
            self._job.engine.abort(self._lane, f"group {self._name!r} was aborted")

    # --- coalescing: verbs need no batching to be right, so they are only waited for together

    def _start_coalescing(self, device: torch.device) -> None:
        if self._coalescing is not None:
            raise CollectiveError(f"group {self._name!r} is coalescing already")
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._coalescing = self._coalescing, None
        return CoalescedWork(works or [])

    # --- calls

    def _refuse_if_ended(self, verb: str) -> None:
        if self._ended is not None:
            raise CollectiveError(
                f"{verb}: process group {self._name!r} {self._ended}; make another one"
            )

    def _timeout_of(self, options: Any) -> timedelta:
        """A call's own timeout where it has one; c10d passes -1 ms for none."""
        timeout = getattr(options, "timeout", None)
        if isinstance(timeout, timedelta) and timeout > timedelta(0):
            return timeout
        return self._timeout

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _begin(
        self,
        call: Call,
        timeout: timedelta,
        owner: Owner,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> tuple[Task, Work]:
        """The task and the work of a call, bound to each other, recorded and profiled."""
        recorder = self._job.recorder
        record = recorder.begin(call)
        event = None
        if torch._C._autograd._profiler_enabled():
            event = torch.autograd._record_function_with_args_enter(  # type: ignore[attr-defined]
                f"tpu_dist:{call.verb}", *inputs
            )
        work = Work(
            outputs,
            lambda: f"{call}: {self._job.engine.absent(call)}",
            event,
            group=self._uid,
            blocks=self._job.blocking_wait,
        )

        def settled(error: BaseException | None) -> None:
            recorder.end(record, time.monotonic() - task.started, error)
            work.finish(error)

        task = Task(call, timeout, owner, settled)
        return task, work

    def _submit(
        self,
        verb: str,
        operations: Iterable[Operation],
        options: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> Work:
        """Run operations on the group's lane, one after the other, as one call."""
        call = Call(
            group=self._name,
            uid=self._uid,
            sequence=self._sequence,
            verb=verb,
            ranks=self._ranks if self._siblings is None else self._siblings.everyone,
            detail=_describe(inputs),
        )
        task, work = self._begin(call, self._timeout_of(options), self._lane, inputs, outputs)
        self._job.engine.submit(self._lane, task, operations, self._siblings)
        return self._collect(work)

    def call_with_siblings(self, siblings: Siblings) -> None:
        """Run this group's calls from now on together with those of its siblings, on all ranks.

        Args:
            siblings: groups that share out all ranks, this one among them.
        """
        self._siblings = siblings
        self._uid = siblings.uid
        self._lane = self._job.engine.lane(siblings.everyone)
        self._lane.has_siblings = True

    def _collect(self, work: Work) -> Work:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work


def finish_calls(group: str | None = None) -> None:
    """Block until the calls on device tensors that were waited for are done; log what has failed.

    Args:
        group: uid of the group whose calls they are; None: all groups.
    """
    for call in calls.under_way():
        if isinstance(call, Work) and call.was_waited_for and group in (None, call.group):
            call.join()
    for error in calls.take_unseen():
        _logger.error(
            "a collective on device tensors has failed, and nobody has read what it should have "
            "written: %s",
            error,
        )


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    if not tensors:
        return ""
    first = tensors[0]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{str(first.dtype).removeprefix('torch.')} {tuple(first.shape)}{more}"
