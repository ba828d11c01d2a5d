"""A lane: the one queue on which a set of ranks, in one order, runs its collectives.

XLA's transport knows a communicator by its devices alone, so groups with the same members share a
lane. Where ranks come to it with calls of different groups, they agree on one that waits on all of
them, and run that first. Different sets of ranks do not wait for each other.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tpu_dist.collectives.border import to_array
from tpu_dist.collectives.dtypes import WIRE_TYPES
from tpu_dist.collectives.envelope import (
    Envelope,
    Signature,
    check_agreement,
    choose_group,
    group_digest,
    pack,
    unpack,
)
from tpu_dist.collectives.forms import FORMS
from tpu_dist.collectives.operations import Operation
from tpu_dist.collectives.programs import Programs
from tpu_dist.collectives.siblings import Siblings
from tpu_dist.collectives.task import Task
from tpu_dist.runtime.device.calls import filling
from tpu_dist.runtime.links import Links
from tpu_dist.runtime.parked_threads import park
from tpu_dist.runtime.runtime import Runtime
from tpu_dist.runtime.transport_sockets import TransportConnections
from tpu_dist.topology.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)
from tpu_dist.topology.placement import place_group
from tpu_dist.topology.rank_map import RankMap

_logger = logging.getLogger(__name__)

_BYTES = WIRE_TYPES[torch.uint8]

# The first large message on a fresh loopback connection stalls for 44 ms a window: the receiver's
# window starts at 64 KiB, one segment of loopback's MTU, and the sender waits for the delayed
# acknowledgement (40 ms) each time. It grows with traffic and stays grown.
_GIVE_WAY_SECONDS = 0.002
_WARM_UP_BYTES = 1 << 20
_WARM_UP_ROUNDS = 4
_WARM_UP_RANKS = 16


_on_lane = threading.local()


def current_lane() -> Lane | None:
    """The lane whose thread this is, if it is one's."""
    lane: Lane | None = getattr(_on_lane, "lane", None)
    return lane


@dataclass(slots=True)
class _Job:
    task: Task
    operations: Iterable[Operation]
    siblings: Siblings | None = None


def _next(operations: Iterator[Operation]) -> Operation | None:
    """The next, after what a generator does behind the one before."""
    with filling():
        return next(operations, None)


@dataclass(slots=True, kw_only=True)
class LaneHooks:
    """What a lane needs of its owner, the engine.

    Attributes:
        open_links: links the lane's ranks with each other, for a task; waits for them.
        absent: which ranks have not made a task's call, and why, in words.
        explain: what is behind an error of the transport, in words; asks the peers.
        announce: tells the peers that the lane has failed here.
    """

    open_links: Callable[[Lane, Task], Links]
    absent: Callable[[Task], str]
    explain: Callable[[Lane, Task, BaseException], CollectiveError]
    announce: Callable[[Lane, CollectiveError], None]


@dataclass(slots=True)
class Lane:
    """Runs tasks in the order in which they are submitted, on a thread of its own.

    Attributes:
        ranks: global ranks; the order is part of the lane's identity.
        rank_map: where the job's ranks stand; None where that is nowhere, or unknown.
        has_siblings: whether groups that share out its ranks run on it, as one program.
    """

    runtime: Runtime
    ranks: tuple[int, ...]
    hooks: LaneHooks
    rank_map: RankMap | None = None
    has_siblings: bool = field(default=False, init=False)
    programs: Programs = field(init=False)
    failure: CollectiveError | None = field(default=None, init=False)
    _queue: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue, init=False)
    _waiting: list[_Job] = field(default_factory=list, init=False)  # taken from the queue, in order
    _links: Links | None = field(default=None, init=False)
    _connections: TransportConnections | None = field(default=None, init=False)
    _is_connected: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        devices = [self.runtime.devices[rank] for rank in self.ranks]
        known = self.rank_map
        placement = None if known is None else place_group(known, self.ranks)
        self.programs = Programs(devices, self.runtime.device, placement)
        if not self._has_programs:
            _logger.warning(
                "ranks %s are a part of %s, where a program must span the whole slice: what they "
                "say to each other goes over the hosts' network, which is slow",
                self.name,
                self.rank_map and self.rank_map.system,
            )

    # --- what operations ask (operations.Members)

    @property
    def table(self) -> str:
        """The platform whose table of plans is used: a stand-in for a slice does as TPUs do."""
        return self.runtime.platform if self.programs.placement is None else "tpu"

    @property
    def _has_programs(self) -> bool:
        """Whether these ranks alone can run programs; else all payloads travel in envelopes."""
        placement = self.programs.placement
        return placement is None or placement.can_run_programs

    @property
    def device(self) -> Any:
        """This process's device."""
        return self.runtime.device

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the lane."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Place of this process among the ranks."""
        return self.ranks.index(self.runtime.rank)

    @property
    def name(self) -> str:
        """What the lane is called between processes."""
        return ",".join(map(str, self.ranks))

    # --- for callers

    def submit(
        self, task: Task, operations: Iterable[Operation], siblings: Siblings | None = None
    ) -> None:
        """Queue a task; it is settled when all of its operations are done, or one has failed.

        On the lane's own thread, where callbacks of futures run, it is run at once: so what a
        callback calls comes right after the call that it follows, on every rank.

        `operations` is iterated on the lane's thread: what a generator does between them, it does
        when the one before is done. With `siblings` they are of groups that share out the lane's
        ranks, and call together.
        """
        job = _Job(task, operations, siblings)
        if self._thread is threading.current_thread():
            self._run_job(job)
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name=f"tpu_dist-lane-{self.name}", daemon=True
                    )
                    self._thread.start()
        self._queue.put(job)

    def fail(self, error: CollectiveError, *, announce: bool = True) -> None:
        """Give up: this and every later task fails; peers are told, and the transport is cut.

        Idempotent; returns at once.
        """
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            links, connections = self._links, self._connections
        self.runtime.healthy = False
        if announce:
            self.hooks.announce(self, error)
        if links is not None:
            links.cut()
        if connections is not None:
            connections.cut()

    def expire(self, task: Task) -> None:
        """See Owner: find out who is missing, and fail the lane with that."""
        seconds = f"{task.timeout.total_seconds():g} s"
        absent = self.hooks.absent(task)
        text = f"{task.call} was not finished within its timeout of {seconds}: {absent}"
        self.give_up(task, CollectiveTimeoutError(text))

    def give_up(self, task: Task, error: CollectiveError) -> None:
        """See Owner: what one task waits for, all behind it wait for."""
        self.fail(error)
        task.settle(error)

    def end(self) -> None:
        """Have the thread end when it is done with what is queued; returns at once."""
        self._queue.put(None)

    def has_ended(self, deadline: float) -> bool:
        """Whether the thread has; waits for it until then."""
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Let go of the links; the thread must have ended, or will never: it does no harm then."""
        if self._thread is not None and self._thread.is_alive():
            park(self._thread)
        elif self._links is not None:
            self._links.close()

    # --- the thread

    def _run(self) -> None:
        _on_lane.lane = self
        while (job := self._next_job()) is not None:
            self._run_job(job)
            del job  # it holds the caller's tensors

    def help_until(self, done: Callable[[], bool]) -> None:
        """Run what is queued until `done`; for a callback, on this thread, that waits for a call.

        What it waits for may be behind it in the queue.
        """
        while not done():
            try:
                job = self._waiting.pop(0) if self._waiting else self._queue.get(timeout=0.002)
            except queue.Empty:
                continue
            if job is None:
                self._queue.put(None)
                return
            self._run_job(job)

    def _next_job(self) -> _Job | None:
        return self._waiting.pop(0) if self._waiting else self._queue.get()

    def _run_job(self, job: _Job) -> None:
        if not job.task.is_settled:
            error: BaseException | None = None
            try:
                self._refuse_if_failed(job.task)
                self._open_links(job.task)
                operations = iter(job.operations)
                while (operation := _next(operations)) is not None:
                    self._execute(operation, job)
            except MismatchError as mismatch:  # every rank has the same, and nothing moved
                error = mismatch
            except CollectiveError as known:
                self.fail(known)
                error = known
            except Exception as unexpected:  # whatever it is, nobody may be left waiting
                error = self._explain(job.task, unexpected)
                self.fail(error)
            job.task.settle(error)

    def _explain(self, task: Task, error: Exception) -> CollectiveError:
        if self.failure is not None:
            return self.failure
        try:
            explained = self.hooks.explain(self, task, error)
        except Exception:
            _logger.exception("%s failed, and why could not be found out", task.call)
            explained = CollectiveError(f"{task.call} failed: {type(error).__name__}: {error}")
        explained.__cause__ = error
        return explained

    def _refuse_if_failed(self, task: Task) -> None:
        if self.failure is not None:
            raise CollectiveError(
                f"{task.call} cannot run: these ranks' connections were given up earlier: "
                f"{self.failure} Destroy the process group, and initialise it again."
            )

    def _open_links(self, task: Task) -> None:
        if self._links is None and self.num_ranks > 1:
            try:
                self._links = self.hooks.open_links(self, task)
            except PeerLostError as lost:
                if lost is self.failure:  # a peer has noticed first, and said so
                    raise
                raise PeerLostError(f"{task.call} failed: {lost}") from lost
            if self.failure is not None:
                self._links.cut()

    def _connect(self) -> None:
        """Bring the transport up, once: the first program opens its connections."""
        if self._is_connected or self.num_ranks == 1:
            return
        own_ports = json.dumps(sorted(self.runtime.transport_ports)).encode()
        ports = [port for block in self._all_gather(own_ports) for port in json.loads(block)]
        connections = self._connections = TransportConnections(frozenset(ports))
        if self.runtime.platform == "cpu" and self.num_ranks <= _WARM_UP_RANKS:
            self._warm_up()
        connections.complete()
        self._is_connected = True
        if self.failure is not None:  # what has connected since must go the same way
            connections.cut()

    def _warm_up(self) -> None:
        program = self.programs.get(FORMS["swap"], size=_WARM_UP_BYTES, wire=_BYTES)
        block = to_array(torch.zeros(_WARM_UP_BYTES, dtype=torch.uint8), self.device)
        for _ in range(_WARM_UP_ROUNDS):
            program([block] * (self.num_ranks - 1))

    def _execute(self, operation: Operation, job: _Job) -> None:
        members: Lane | Siblings = job.siblings or self
        signature = operation.signature
        payload = operation.payload(always=job.siblings is None and not self._has_programs)
        envelopes = self._exchange_envelopes(signature, payload, members.num_ranks)
        while any(envelope.group != envelopes[0].group for envelope in envelopes):
            self._give_way(job, choose_group(envelopes))
            envelopes = self._exchange_envelopes(signature, payload, members.num_ranks)
        own = envelopes
        if job.siblings is None:
            check_agreement(signature, envelopes, self.ranks)
        else:
            job.siblings.check_agreement(signature, envelopes, self.ranks)
            own = job.siblings.own(envelopes, self.ranks)
        if all(envelope.is_inline for envelope in envelopes):
            with filling():
                operation.finish_inline(own, members)
        else:
            self._connect()
            with filling():
                operation.run(envelopes, members)

    def _give_way(self, job: _Job, group: bytes | None) -> None:
        """Ranks stand at calls of different groups: run the next call of `group` first.

        Threads may call groups with the same members in any order, as long as each group's own
        calls are in one. None: no group has a call on every rank yet, so wait for one.
        """
        if group is None:
            time.sleep(_GIVE_WAY_SECONDS)
        elif group != group_digest(job.task.call.uid):
            other = next(j for j in self._waiting if group_digest(j.task.call.uid) == group)
            self._waiting.remove(other)
            self._run_job(other)

    def _other_groups(self, own: bytes) -> list[bytes]:
        """Digests of the other groups that have a call waiting here, in order of arrival."""
        while not self._queue.empty():
            job = self._queue.get()
            if job is None:
                self._queue.put(None)  # the end; not before what waits
                break
            self._waiting.append(job)
        digests = (group_digest(job.task.call.uid) for job in self._waiting)
        return list(dict.fromkeys(digest for digest in digests if digest != own))

    def _exchange_envelopes(
        self, signature: Signature, payload: bytes | None, num_ranks: int
    ) -> list[Envelope]:
        """All ranks' envelopes; without their sizes if they are of different groups."""
        own = pack(signature, payload, self._other_groups(group_digest(signature.uid)))
        blocks = self._all_gather(own)
        if self.has_siblings:  # of other sizes than the lane, and so are their envelopes' tables
            heads = [unpack(block, 0) for block in blocks]
            if any(head.group != heads[0].group for head in heads):
                return heads
        return [unpack(block, num_ranks) for block in blocks]

    def _all_gather(self, block: bytes) -> list[bytes]:
        """Everybody's block, by place in the lane."""
        return [block] if self._links is None else self._links.all_gather(block)
