"""The worker processes of one round: who ended, in which order, and how to end the others."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from typing import Any

_KILL_TIMEOUT = timedelta(seconds=10)  # SIGKILL is done in ms, except in uninterruptible sleep
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One started worker: its global and local rank and its process."""

    rank: int
    local_rank: int
    process: Popen[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        rank: its global rank.
        local_rank: its rank on this host.
        pid: its process.
        exit_code: its status, or -N where signal N ended it.
        at: when, in seconds of the epoch.
        ran_for: since its start.
        asked: whether the launcher had asked it to end.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    at: float
    ran_for: timedelta
    asked: bool


class WorkerProcesses:
    """Owns the started workers of one round until they have ended.

    One thread per worker waits for its end, so that the order in which workers failed is known
    however seldom anybody looks; torchelastic's own polling cannot tell. Each worker leads a
    process group (torchelastic gives each a session), and it is groups that are ended, with
    whatever processes the workers started: those, too, may hold a TPU. The group of a worker that
    ended well is left alone.

    ``stop`` and ``kill`` are for the main thread, the rest is thread-safe.
    """

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = tuple(workers)
        self._started = time.monotonic()
        self._changed = threading.Condition()  # guards what follows
        self._exits: dict[int, WorkerExit] = {}  # by pid, in the order of ending
        self._asked = False
        for worker in self._workers:
            threading.Thread(
                target=self._await_exit,
                args=(worker,),
                name=f"tpu-launch-worker-{worker.local_rank}",
                daemon=True,
            ).start()

    @property
    def exits(self) -> tuple[WorkerExit, ...]:
        """Those who ended, in the order of ending."""
        with self._changed:
            return tuple(self._exits.values())

    @property
    def all_ended(self) -> bool:
        """Whether no worker runs any more."""
        return len(self.exits) == len(self._workers)

    @property
    def failures(self) -> tuple[WorkerExit, ...]:
        """Those who ended badly without having been asked to end, in the order of ending."""
        return tuple(end for end in self.exits if end.exit_code != 0 and not end.asked)

    def stop(self, signum: signal.Signals, grace: timedelta) -> int:
        """End all workers: ``signum``, and SIGKILL for what is left after ``grace``. Blocks.

        A stopped worker (SIGSTOP) is continued, as it would not see the signal before.

        Returns:
            How many groups had to be killed.

        Raises:
            TimeoutError: a process outlives SIGKILL by 10 s: the kernel does not let it go.
        """
        with self._changed:
            self._asked = True
        self._signal(self._remaining(), signum)
        self._signal(self._remaining(), signal.SIGCONT)
        left = self._wait(grace)
        self._signal(left, signal.SIGKILL)
        undying = self._wait(_KILL_TIMEOUT) if left else []
        if undying:
            pids = ", ".join(str(worker.process.pid) for worker in undying)
            raise TimeoutError(
                f"processes of the groups {pids} still exist {_KILL_TIMEOUT.seconds} s after "
                f"SIGKILL: most likely in uninterruptible sleep on a device (state D in ps)"
            )
        return len(left)

    def kill(self) -> None:
        """Send SIGKILL to all that is left, and do not wait; may be called while ``stop`` waits."""
        with self._changed:
            self._asked = True
        self._signal(self._remaining(), signal.SIGKILL)

    def _await_exit(self, worker: Worker) -> None:
        exit_code = worker.process.wait()
        ran_for = timedelta(seconds=time.monotonic() - self._started)
        with self._changed:
            self._exits[worker.process.pid] = WorkerExit(
                rank=worker.rank,
                local_rank=worker.local_rank,
                pid=worker.process.pid,
                exit_code=exit_code,
                at=time.time(),
                ran_for=ran_for,
                asked=self._asked,
            )
            self._changed.notify_all()

    def _remaining(self) -> list[Worker]:
        """Return the workers of whose group something may be left to end."""
        return [worker for worker in self._workers if self._group_remains(worker)]

    def _group_remains(self, worker: Worker) -> bool:
        pid = worker.process.pid
        with self._changed:
            end = self._exits.get(pid)
        if end is None:
            return True
        return end.exit_code != 0 and _group_exists(pid)

    def _wait(self, limit: timedelta) -> list[Worker]:
        """Wait until no group remains, at most ``limit``; return whose do."""
        deadline = time.monotonic() + limit.total_seconds()
        with self._changed:
            while left := self._remaining():
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    break
                # Worker ends notify; those of their children do not.
                self._changed.wait(min(seconds, _POLL_SECONDS))
        return left

    @staticmethod
    def _signal(workers: Iterable[Worker], signum: signal.Signals) -> None:
        for worker in workers:
            try:
                os.killpg(worker.process.pid, signum)
            except (ProcessLookupError, PermissionError):  # gone; macOS says EPERM of a zombie
                continue


def _group_exists(group: int) -> bool:
    """Whether a process of the group lives; a zombie does not (init may be slow to reap it)."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if sys.platform != "linux":
        return True
    return any(_is_living_member(stat, group) for stat in Path("/proc").glob("[0-9]*/stat"))


def _is_living_member(stat: Path, group: int) -> bool:
    try:
        # pid (name) state parent group ...: the name may hold anything, also a parenthesis
        state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in "ZX"
