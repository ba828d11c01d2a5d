"""Runs a function on many ranks, each a process of its own, and never leaves one behind.

Three forms, one machinery:

    run_ranks(fn, 2)                       # fresh processes, fn(rank, *args) on each, its results
    with Ranks(fn, 2) as ranks: ...        # the same, for tests that kill, stop and look at ranks
    pool = RankPool(2); pool(fn, *args)    # the same processes and process group for many fn

Functions and results travel by pickle, functions by name: define them at the top of a module.
Every wait has a deadline; on expiry all ranks' Python stacks are in the error and all are killed.
Ranks are forked from a server that has imported torch, but never jax: they start in well under a
second. Their environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR ...), on a store that the
parent owns, so that any rank may die.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, set_debug_level_from_env

BACKEND = os.environ.get("TPU_DIST_TEST_BACKEND", "tpu_dist")
"""The backend under test; TPU_DIST_TEST_BACKEND=gloo runs the tests against their oracle."""


def gloo_cannot(reason: str) -> pytest.MarkDecorator:
    """Marks a test of what gloo lacks: skipped when gloo stands in for the backend."""
    return pytest.mark.skipif(BACKEND == "gloo", reason=f"gloo: {reason}")


HOST = "127.0.0.1"
GROUP_TIMEOUT = timedelta(seconds=60)
STARTUP = timedelta(seconds=60)
"""What starting ranks may take on a busy machine, on top of what they are asked to do."""
GRACE = timedelta(seconds=3)
"""How long the others may go on after one rank has failed."""

_RANK_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TPU_DIST_PLATFORM": "cpu"}
_PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]
_LOG_LINES = 40


class RanksFailed(AssertionError):
    """A rank raised, died or did not finish; the message has every rank's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one call on one rank.

    `value` is what the function returned, `error` is "TypeName: message" of what it raised,
    `died` is "died by signal 9" or "exited with code 3". Exactly one applies, by `kind`.
    """

    rank: int
    kind: Literal["result", "error", "died"]
    value: Any = None
    error: str = ""
    traceback: str = ""
    died: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "result"

    def __str__(self) -> str:
        first_line = self.error.partition("\n")[0]
        said = {"result": "finished", "error": f"raised {first_line}", "died": self.died}
        return said[self.kind]


# ---------------------------------------------------------------------------------------------
# In a rank's process


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """What a rank's process is told at its start."""

    rank: int
    world_size: int
    backend: str
    timeout: timedelta
    port: int
    init: bool
    env: Mapping[str, str | None]
    stacks: str
    log: str


_store: Store | None = None


def mark(name: str) -> None:
    """In a rank: tell the parent and the other ranks that this rank has come to `name`."""
    assert _store is not None, "mark() is for functions run by this harness"
    _store.set(f"mark/{os.environ['RANK']}/{name}", "1")


def wait_mark(rank: int, name: str, timeout: timedelta = timedelta(seconds=30)) -> None:
    """In a rank: wait until `rank` has called mark(name). Raises DistStoreError on time-out."""
    assert _store is not None, "wait_mark() is for functions run by this harness"
    _store.wait([f"mark/{rank}/{name}"], timeout)


def harness_store() -> Store:
    """In a rank: a store shared by the ranks and the parent, apart from the process group's."""
    assert _store is not None, "harness_store() is for functions run by this harness"
    return _store


def _end_with_the_parent() -> None:
    """Sees to it that a test run that is killed leaves no rank, not even a stopped one."""
    # Only the parent keeps the fork server: it ends with the parent, and takes this rank along.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # What this rank has started goes as well.
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="harness-parent-watch", daemon=True).start()


def _set_up(spec: _Spec) -> None:
    global _store
    os.setpgrp()  # what this rank starts is killed with it
    _end_with_the_parent()
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    stacks = open(spec.stacks, "w")  # the handler keeps it open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported in the fork server: something imports it too early")
    torchrun = {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(spec.rank),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(spec.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, as torchrun does
    }
    for name, value in {**_RANK_ENV, **torchrun, **spec.env}.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    torch.set_num_threads(1)
    set_debug_level_from_env()
    store = TCPStore(HOST, spec.port, is_master=False, timeout=spec.timeout)
    _store = PrefixStore("harness", store)
    if spec.init:
        dist.init_process_group(
            spec.backend,
            store=PrefixStore("world", store),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=spec.timeout,
        )


def _reply(connection: Connection, call: Callable[[], Any]) -> bool:
    answer: tuple[str, Any]
    try:
        answer = ("result", pickle.dumps(call()))
    except BaseException as error:  # a process edge: everything is reported to the parent
        answer = ("error", (f"{type(error).__name__}: {error}", traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        connection.send(answer)
    return answer[0] == "result"


def _call(rank: int, packed: bytes) -> Any:
    fn, args = pickle.loads(packed)
    random.seed(0)
    torch.manual_seed(0)
    return fn(rank, *args)


def _tear_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A forked child ends by os._exit: without this no exit handler of jax or torch is tested.
    atexit._run_exitfuncs()


def _rank_main(connection: Connection, spec: _Spec) -> None:
    try:
        _set_up(spec)
    except BaseException as error:
        failure = (f"{type(error).__name__}: {error}", traceback.format_exc())
        connection.send(("error", failure))
        sys.exit(1)
    ok = True
    while True:
        try:
            packed = connection.recv()
        except EOFError:
            sys.exit(1)
        if packed is None:
            break
        ok = _reply(connection, partial(_call, spec.rank, packed))
    closed = _reply(connection, _tear_down)
    sys.exit(0 if ok and closed else 1)


# ---------------------------------------------------------------------------------------------
# In the parent


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _exit_text(code: int) -> str:
    return f"died by signal {-code}" if code < 0 else f"exited with code {code}"


class Ranks:
    """`world_size` fresh processes that run one function, to be watched, stopped and killed.

    Owns the processes and their store; use it in a `with`, at whose end all are killed.

        with Ranks(train, 2) as ranks:
            ranks.wait_mark(1, "step 3")
            ranks.kill(1)
            survivor, dead = ranks.results(timedelta(seconds=20))
            assert "rank 1" in survivor.error and dead.died == "died by signal 9"
    """

    def __init__(
        self,
        fn: Callable[..., Any] | None,
        world_size: int,
        *,
        backend: str = BACKEND,
        timeout: timedelta = GROUP_TIMEOUT,
        args: Sequence[Any] = (),
        init: bool = True,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._marks = PrefixStore("harness", self._store)
        self._processes: list[multiprocessing.context.ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._pending: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the server loads torch
        context = _context()
        try:
            for rank in range(world_size):
                spec = _Spec(
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    timeout=timeout,
                    port=self._store.port,
                    init=init,
                    env=dict(env or {}),
                    stacks=str(self._folder / f"stacks-{rank}"),
                    log=str(self._folder / f"log-{rank}"),
                )
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank_main, args=(theirs, spec), daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            if fn is not None:
                self.submit(fn, args)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [process.pid or 0 for process in self._processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal, SIGKILL unless told, to `rank`."""
        os.kill(self.pids[rank], number)

    def stop(self, rank: int) -> None:
        """Freezes `rank` (SIGSTOP): alive, its sockets open, nothing answered."""
        self.kill(rank, signal.SIGSTOP)

    def cont(self, rank: int) -> None:
        """Lets a stopped `rank` go on."""
        self.kill(rank, signal.SIGCONT)

    def wait_mark(self, rank: int, name: str, timeout: timedelta = timedelta(seconds=60)) -> None:
        """Waits until `rank` has called mark(name); fails if it ends or `timeout` passes."""
        end = time.monotonic() + timeout.total_seconds()
        while not self._marks.check([f"mark/{rank}/{name}"]):
            self._take(timedelta(0))
            if rank in self._outcomes:
                self._fail(f"rank {rank} ended before it came to {name!r}")
            if time.monotonic() > end:
                self._fail(f"rank {rank} did not come to {name!r} in {timeout}")
            time.sleep(0.01)

    def submit(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Starts fn(rank, *args) on every rank; the last call's results must have been taken."""
        if self._pending:
            raise ValueError(f"ranks {sorted(self._pending)} still run the last function")
        self._order(pickle.dumps((fn, tuple(args))))

    def results(
        self,
        deadline: timedelta = GROUP_TIMEOUT,
        *,
        of: Iterable[int] | None = None,
        grace: timedelta | None = None,
    ) -> list[Outcome]:
        """Waits for the outcome of every rank (or of those named) and returns them in order.

        Fails, naming them and showing their stacks, if some have none by the deadline. With
        `grace`, the deadline shrinks to that when the first rank fails.
        """
        wanted = range(self.world_size) if of is None else list(of)
        end = time.monotonic() + deadline.total_seconds()
        while missing := [rank for rank in wanted if rank not in self._outcomes]:
            if time.monotonic() > end:
                self._fail(f"ranks {missing} did not finish in {deadline}")
            before = len(self._outcomes)
            self._take(timedelta(seconds=max(0.0, min(end - time.monotonic(), 1.0))))
            failed = not all(outcome.ok for outcome in self._outcomes.values())
            if grace is not None and failed and len(self._outcomes) > before:
                end = min(end, time.monotonic() + grace.total_seconds())
        return [self._outcomes[rank] for rank in wanted]

    def finish(self, deadline: timedelta = GROUP_TIMEOUT) -> list[str]:
        """Has every rank destroy its group and exit; returns "exited with code 0" and the like.

        Fails if a rank's clean-up raises, or if one has not exited by the deadline.
        """
        end = time.monotonic() + deadline.total_seconds()
        dead = {rank for rank, outcome in self._outcomes.items() if outcome.kind == "died"}
        self._order(None)
        outcomes = self.results(deadline, grace=GRACE)
        if wrong := [o.rank for o in outcomes if o.kind == "error"]:
            self._fail(f"ranks {wrong} failed in destroy_process_group or at exit")
        for rank, process in enumerate(self._processes):
            if rank not in dead:
                process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                self._fail(f"rank {rank} did not exit in {deadline}")
        return [_exit_text(process.exitcode or 0) for process in self._processes]

    def close(self) -> None:
        """Kills what is left, with whatever the ranks started, and waits for its end."""
        for pid, process in zip(self.pids, self._processes, strict=True):
            for end in (os.killpg, os.kill):  # the group is missing in a rank's first moment
                with contextlib.suppress(ProcessLookupError):
                    if process.exitcode is None or end is os.killpg:
                        end(pid, signal.SIGKILL)
        for process in self._processes:
            process.join(10)
            if process.exitcode is None:
                raise RuntimeError(f"pid {process.pid} outlived SIGKILL by 10 s")
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def report(self, outcomes: Sequence[Outcome]) -> str:
        """Every rank's state, tracebacks and last log lines, for an error message."""
        parts = [f"  rank {o.rank}: {o}" for o in outcomes]
        shown: dict[str, int] = {}
        for outcome in outcomes:
            if not outcome.ok:
                trace, log = outcome.traceback, self._tail(outcome.rank)
                if trace and trace in shown:
                    trace = f"the same as rank {shown[trace]}\n"
                shown.setdefault(trace, outcome.rank)
                parts.append(f"--- rank {outcome.rank} ---\n{trace}{log}")
        return "\n".join(parts)

    def _order(self, packed: bytes | None) -> None:
        self._outcomes = {r: o for r, o in self._outcomes.items() if o.kind == "died"}
        self._pending = set(range(self.world_size)) - set(self._outcomes)
        for rank in self._pending:
            with contextlib.suppress(OSError):  # a dead one is found out by _take
                self._connections[rank].send(packed)

    def _take(self, timeout: timedelta) -> None:
        """Takes what outcomes there are, waiting up to `timeout` for the first."""
        sources: dict[Any, int] = {}
        for rank in self._pending:
            sources[self._connections[rank]] = rank
            sources[self._processes[rank].sentinel] = rank
        ready = wait(list(sources), timeout.total_seconds())
        for rank in {sources[source] for source in ready}:
            self._outcomes[rank] = self._read(rank)
            self._pending.discard(rank)

    def _read(self, rank: int) -> Outcome:
        try:
            # An outcome sent before the end counts, so the pipe is looked at first.
            kind, answer = self._connections[rank].recv()
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(5)
            code = process.exitcode
            died = "closed its pipe but lives on" if code is None else _exit_text(code)
            return Outcome(rank=rank, kind="died", died=died)
        if kind == "result":
            return Outcome(rank=rank, kind="result", value=pickle.loads(answer))
        return Outcome(rank=rank, kind="error", error=answer[0], traceback=answer[1])

    def _fail(self, message: str) -> NoReturn:
        """Dumps the stacks of the ranks that run, kills all, and raises."""
        stacks = [f"--- rank {rank}, where it is ---\n{self._stacks(rank)}{self._tail(rank)}"
                  for rank in sorted(self._pending)]  # fmt: skip
        states = self.report([self._outcomes[rank] for rank in sorted(self._outcomes)])
        self.close()
        raise RanksFailed("\n".join([message, states, *stacks]))

    def _stacks(self, rank: int) -> str:
        file = self._folder / f"stacks-{rank}"
        if self._processes[rank].exitcode is not None or not file.exists():
            return "(has no stack to show)\n"
        self.kill(rank, signal.SIGUSR1)
        end = time.monotonic() + 2
        text = ""
        # Complete when it has stopped growing; a frozen or dead rank writes nothing.
        while time.monotonic() < end and not (text and text == file.read_text()):
            text = file.read_text()
            time.sleep(0.05)
        return text or "(did not answer SIGUSR1: stopped, or deep in C)\n"

    def _tail(self, rank: int) -> str:
        file = self._folder / f"log-{rank}"
        text = file.read_text(errors="replace") if file.exists() else ""
        if not text.strip():
            return ""
        return "its output ends:\n" + "\n".join(text.splitlines()[-_LOG_LINES:]) + "\n"


def _values(ranks: Ranks, deadline: timedelta, name: str) -> list[Any]:
    outcomes = ranks.results(deadline, grace=GRACE)
    if wrong := [o.rank for o in outcomes if not o.ok]:
        raise RanksFailed(f"{name} failed on ranks {wrong}\n{ranks.report(outcomes)}")
    return [outcome.value for outcome in outcomes]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    backend: str = BACKEND,
    timeout: timedelta = GROUP_TIMEOUT,
    args: Sequence[Any] = (),
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Runs fn(rank, *args) in `world_size` fresh processes and returns its results by rank.

    Each joins a process group of `backend` first, unless `init` is False, and destroys it after.
    A failure of any rank, in fn or in the clean-up, is raised as RanksFailed with its traceback.

    Args:
        fn: a function at the top of an importable module; what it returns must pickle.
        world_size: how many ranks.
        backend: the c10d backend of the default group.
        timeout: the group's timeout; the whole may take this and a minute for the start.
        args: more arguments for fn.
        init: whether to call init_process_group.
        env: environment of the ranks, None removes a variable. torch is already imported when
            it is set, jax is not.
    """
    with Ranks(
        fn, world_size, backend=backend, timeout=timeout, args=args, init=init, env=env
    ) as ranks:
        values = _values(ranks, timeout + STARTUP, _name(fn))
        exits = ranks.finish(timeout)
        if set(exits) != {"exited with code 0"}:
            raise RanksFailed(f"after {_name(fn)} the ranks {exits}")
        return values


class RankPool:
    """The same ranks and process group for many functions: starts once, at the first call.

    pool(fn, *args) returns the results of fn(rank, *args) by rank. A failure on any rank ends
    all of them, and the next call starts new ones. Not thread-safe.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = BACKEND,
        timeout: timedelta = GROUP_TIMEOUT,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self._timeout = timeout
        self._env = env
        self._ranks: Ranks | None = None

    def __call__(
        self, fn: Callable[..., Any], *args: Any, deadline: timedelta | None = None
    ) -> list[Any]:
        """Runs fn(rank, *args) on every rank; `deadline` is the group's timeout unless given."""
        deadline = deadline or self._timeout
        if self._ranks is None:
            self._ranks = Ranks(
                None, self.world_size, backend=self.backend, timeout=self._timeout, env=self._env
            )
            deadline += STARTUP
        ranks, self._ranks = self._ranks, None  # a call that fails leaves no pool
        try:
            ranks.submit(fn, args)
            values = _values(ranks, deadline, _name(fn))
        except BaseException:
            ranks.close()
            raise
        self._ranks = ranks
        return values

    def close(self) -> None:
        """Has the ranks destroy their group and exit; raises RanksFailed if that fails."""
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            with ranks:
                exits = ranks.finish(self._timeout)
            if set(exits) != {"exited with code 0"}:
                raise RanksFailed(f"at the pool's end the ranks {exits}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
