"""The engine: all lanes of this process, their deadlines, and what they say to the peers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tpu_dist.collectives.diagnosis import Progress, describe_absent, find_absent
from tpu_dist.collectives.lane import Lane, LaneHooks
from tpu_dist.collectives.operations import Operation
from tpu_dist.collectives.siblings import Siblings
from tpu_dist.collectives.task import Call, Task
from tpu_dist.runtime.channel import Meta
from tpu_dist.runtime.links import Links, Switchboard
from tpu_dist.runtime.runtime import Runtime
from tpu_dist.topology.errors import CollectiveError, CollectiveTimeoutError, PeerLostError

_logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.1  # how late a deadline may be noticed
PROBE_SECONDS = 3.0  # after this a waiting task asks whether its peers still live
FINISH_SECONDS = 0.2  # what is queued at the end of the process may still finish in this
CUT_SECONDS = 2.0  # after a cut, a program returns in milliseconds; while it connects, it may not
TOLD_SECONDS = 0.5  # a peer that gives up tells why before its connection breaks; usually


class Engine:
    """Owns the lanes and the watchdog thread of a Runtime; closed with it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.progress: dict[str, Progress] = {}
        self._lanes: dict[tuple[int, ...], Lane] = {}
        self._tasks: dict[int, Task] = {}
        self._probed: dict[int, float] = {}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._closed = False
        self._switchboard = Switchboard(runtime.channel)
        self._hooks = LaneHooks(
            open_links=self._open_links,
            absent=lambda task: self.absent(task.call),
            explain=self._explain,
            announce=self._announce,
        )
        for kind, handler in (
            ("where", self._on_where),
            ("failed", self._on_failed),
        ):
            runtime.channel.on(kind, handler)
        runtime.at_close.append(self.close)
        self._thread = threading.Thread(target=self._watch, name="tpu_dist-watchdog", daemon=True)
        self._thread.start()

    def lane(self, ranks: Sequence[int]) -> Lane:
        """The lane of these ranks in this order."""
        key = tuple(ranks)
        with self._lock:
            lane = self._lanes.get(key)
            if lane is None:
                lane = Lane(self.runtime, key, self._hooks, self.runtime.rank_map)
                self._lanes[key] = lane
            return lane

    def submit(
        self,
        lane: Lane,
        task: Task,
        operations: Iterable[Operation],
        siblings: Siblings | None = None,
    ) -> None:
        """Run `operations` on `lane`, under the task's deadline."""
        self.watch(task)
        call = task.call
        self.progress[call.uid] = Progress(sequence=call.sequence, call=str(call))
        lane.submit(task, operations, siblings)

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
        self._end(list(self._lanes.values()))
        self._lanes.clear()  # they hold this engine
        self._switchboard.close()
        self._thread.join(timeout=5)

    @staticmethod
    def _end(lanes: Sequence[Lane]) -> None:
        """End the lanes' threads; what is still running then is cut short."""
        for lane in lanes:
            lane.end()
        deadline = time.monotonic() + FINISH_SECONDS
        running = [lane for lane in lanes if not lane.has_ended(deadline)]
        for lane in running:
            lane.fail(CollectiveError("the process group was shut down"))
        deadline = time.monotonic() + CUT_SECONDS
        for lane in running:
            lane.has_ended(deadline)
        for lane in lanes:
            lane.close()

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

    def _open_links(self, lane: Lane, task: Task) -> Links:
        """Links among the lane's ranks; the watchdog ends the wait for them."""

        def check() -> None:
            if lane.failure is not None:
                raise lane.failure
            if task.is_settled:
                raise CollectiveError(f"{task.call} was given up before its ranks had met")

        return self._switchboard.open(lane.ranks, lane.name, check)

    def absent(self, call: Call) -> str:
        """Which ranks have not made `call`, and why, in words; asks them, for a second at most."""
        return describe_absent(find_absent(self.runtime.channel, call, self.runtime.rank))

    def _explain(self, lane: Lane, task: Task, error: BaseException) -> CollectiveError:
        """Say what an error of the transport comes from."""
        _wait_until(lambda: lane.failure is not None, time.monotonic() + TOLD_SECONDS)
        if lane.failure is not None:
            return lane.failure
        absent = find_absent(self.runtime.channel, task.call, self.runtime.rank, only_lost=True)
        if absent:
            return PeerLostError(f"{task.call} failed: {describe_absent(absent)}")
        return CollectiveError(f"{task.call} failed: {type(error).__name__}: {error}")

    def _announce(self, lane: Lane, error: CollectiveError) -> None:
        message = {"lane": lane.name, "kind": type(error).__name__, "text": str(error)}
        self._tell(lane.ranks, "failed", message)

    def _tell(self, ranks: Sequence[int], kind: str, message: Meta) -> None:
        for rank in ranks:
            if rank != self.runtime.rank:
                with contextlib.suppress(PeerLostError):
                    self.runtime.channel.send(rank, kind, message)

    # --- what peers say

    def _on_where(self, rank: int, meta: Meta, body: bytes) -> Meta:
        progress = self.progress.get(meta["group"])
        if progress is None:
            return {"sequence": 0, "call": ""}
        return {"sequence": progress.sequence, "call": progress.call}

    def _on_failed(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        kinds = {
            kind.__name__: kind for kind in (CollectiveTimeoutError, PeerLostError, CollectiveError)
        }
        error = kinds.get(meta["kind"], CollectiveError)(f"rank {rank} gave up: {meta['text']}")
        self.lane(_ranks(meta["lane"])).fail(error, announce=False)
        return None


def _ranks(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(",")))


def _start(function: Callable[[Task], None], task: Task) -> None:
    """Run `function` beside the watchdog: it may ask peers, and others' deadlines must not wait."""

    def run() -> None:
        try:
            function(task)
        except Exception as error:  # whatever it is, nobody may be left waiting
            _logger.exception("%s could not be diagnosed", task.call)
            task.owner.give_up(task, CollectiveError(f"{task.call} failed: {error}"))

    threading.Thread(target=run, daemon=True).start()


def _wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    """Poll `condition` with growing pauses up to 20 ms; False if the deadline came first."""
    pause = 0.0002
    while not condition():
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(min(pause, max(0.0, deadline - now)))
        pause = min(pause * 1.5, 0.02)
    return True
