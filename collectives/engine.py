"""The engine: all lanes of this process, their deadlines, and what they say to the peers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tpu_dist.collectives.diagnosis import Progress, describe_absent, find_absent
from tpu_dist.collectives.lane import Lane, LaneHooks, wait_until
from tpu_dist.collectives.operations import Operation
from tpu_dist.collectives.task import Call, Task
from tpu_dist.runtime.channel import Meta
from tpu_dist.runtime.runtime import Runtime
from tpu_dist.topology.errors import CollectiveError, CollectiveTimeoutError, PeerLostError

_logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.1  # how late a deadline may be noticed
PROBE_SECONDS = 3.0  # after this a waiting task asks whether its peers still live
TOLD_SECONDS = 0.5  # a peer that gives up tells why before its connection breaks; usually


class Engine:
    """Owns the lanes and the watchdog thread of a Runtime; closed with it."""

    def __init__(self, runtime: Runtime, store: Any) -> None:
        """Start watching.

        Args:
            runtime: of this process.
            store: a c10d store that all ranks share, for this engine alone: a thread that waits
                on a store keeps others from it.
        """
        self.runtime = runtime
        self.store = store
        self.progress: dict[str, Progress] = {}
        self._lanes: dict[tuple[int, ...], Lane] = {}
        self._tasks: dict[int, Task] = {}
        self._probed: dict[int, float] = {}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._closed = False
        self._hooks = LaneHooks(
            assemble=self._assemble,
            absent=lambda task: self.absent(task.call),
            explain=self._explain,
            announce=self._announce,
        )
        runtime.channel.on("where", self._on_where)
        runtime.channel.on("failed", self._on_failed)
        runtime.at_close.append(self.close)
        self._thread = threading.Thread(target=self._watch, name="tpu_dist-watchdog", daemon=True)
        self._thread.start()

    def lane(self, ranks: Sequence[int]) -> Lane:
        """The lane of these ranks in this order."""
        key = tuple(ranks)
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(self.runtime, key, self._hooks)
            return lane

    def submit(self, lane: Lane, task: Task, operations: Iterable[Operation]) -> None:
        """Run `operations` on `lane`, under the task's deadline."""
        self.watch(task)
        call = task.call
        self.progress[call.uid] = Progress(sequence=call.sequence, call=str(call))
        lane.submit(task, operations)

    def watch(self, task: Task) -> None:
        """Have the task's owner end it at its deadline, unless it is settled by then."""
        self._tasks[id(task)] = task
        if not self._busy.is_set():
            self._busy.set()

    def abort(self, lane: Lane, reason: str) -> None:
        """End what runs on a lane, now."""
        lane.fail(CollectiveError(reason))

    def close(self) -> None:
        """End the watchdog and all lanes."""
        if self._closed:
            return
        self._closed = True
        self._busy.set()
        for lane in list(self._lanes.values()):
            lane.close()
        self._thread.join(timeout=5)

    # --- the watchdog

    def _watch(self) -> None:
        while not self._closed:
            self._busy.wait()
            self._busy.clear()
            while not self._closed and self._tasks:
                time.sleep(WATCH_SECONDS)
                self._check(time.monotonic())

    def _check(self, now: float) -> None:
        for key, task in list(self._tasks.items()):
            if task.is_settled:
                self._tasks.pop(key, None)
                self._probed.pop(key, None)
            elif now >= task.deadline:
                self._tasks.pop(key, None)
                _start(task.owner.expire, task)
            elif now - self._probed.get(key, task.started) >= PROBE_SECONDS:
                self._probed[key] = now
                _start(self._probe, task)

    def _probe(self, task: Task) -> None:
        """Notice a peer that has died where the transport would not: before it ever connected."""
        absent = find_absent(self.runtime.channel, task.call, self.runtime.rank, only_lost=True)
        if absent and not task.is_settled:
            text = f"{task.call} cannot finish: {describe_absent(absent)}"
            task.owner.give_up(task, PeerLostError(text))

    # --- the hooks of lanes

    def _assemble(self, lane: Lane, task: Task) -> None:
        prefix = f"lane/{lane.name}/"
        keys = [f"{prefix}{rank}" for rank in lane.ranks]
        self.store.set(f"{prefix}{self.runtime.rank}", "ready")

        def stop_if_over() -> None:
            if lane.failure is not None:
                raise lane.failure
            if task.is_settled:
                raise CollectiveError(f"{task.call} was given up before its ranks had met")

        # The watchdog keeps the deadline, and says who is missing.
        wait_until(lambda: self._all_set(keys, stop_if_over), float("inf"), every=stop_if_over)

    def _all_set(self, keys: list[str], stop_if_over: Any) -> bool:
        stop_if_over()
        return bool(self.store.check(keys))

    def absent(self, call: Call) -> str:
        """Which ranks have not made `call`, and why, in words; asks them, for a second at most."""
        return describe_absent(find_absent(self.runtime.channel, call, self.runtime.rank))

    def _explain(self, lane: Lane, task: Task, error: BaseException) -> CollectiveError:
        """Say what an error of the transport comes from."""
        wait_until(lambda: lane.failure is not None, time.monotonic() + TOLD_SECONDS)
        if lane.failure is not None:
            return lane.failure
        absent = find_absent(self.runtime.channel, task.call, self.runtime.rank, only_lost=True)
        if absent:
            return PeerLostError(f"{task.call} failed: {describe_absent(absent)}")
        return CollectiveError(f"{task.call} failed: {type(error).__name__}: {error}")

    def _announce(self, lane: Lane, error: CollectiveError) -> None:
        message = {"lane": lane.name, "kind": type(error).__name__, "text": str(error)}
        for rank in lane.ranks:
            if rank != self.runtime.rank:
                try:
                    self.runtime.channel.send(rank, "failed", message)
                except PeerLostError:
                    continue

    # --- what peers say

    def _on_where(self, rank: int, meta: Meta, body: bytes) -> Meta:
        progress = self.progress.get(meta["group"])
        if progress is None:
            return {"sequence": 0, "call": ""}
        return {"sequence": progress.sequence, "call": progress.call}

    def _on_failed(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        ranks = tuple(map(int, meta["lane"].split(",")))
        kinds = {
            kind.__name__: kind for kind in (CollectiveTimeoutError, PeerLostError, CollectiveError)
        }
        error = kinds.get(meta["kind"], CollectiveError)(f"rank {rank} gave up: {meta['text']}")
        self.lane(ranks).fail(error, announce=False)
        return None


def _start(function: Callable[[Task], None], task: Task) -> None:
    """Run `function` beside the watchdog: it may ask peers, and others' deadlines must not wait."""
    threading.Thread(target=function, args=(task,), daemon=True).start()
