"""Runs tpu-launch in tests as a process of its own, without paying for torch's import each time.

The launcher is forked from a server process that has imported torch (multiprocessing's forkserver)
and runs the real `main`, with its own environment, directory and output files. Every process of a
run is known by a token in its environment, so that a test can say that none is left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE = 20.0  # of a wait that takes well under a second on an idle machine

_TOKEN = "LAUNCH_TEST_TOKEN"
_CONTEXT = multiprocessing.get_context("forkserver")

# What the worker scripts of the tests start with: `note` makes a fact known to the test.
_PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
NOTES = pathlib.Path(os.environ["NOTES"])
def note(name, value=None):
    path = NOTES / f"{name}.{ATTEMPT}.{RANK}"
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value))
    new.rename(path)
def wait_for(name, rank):
    deadline = time.monotonic() + 20
    while not (NOTES / f"{name}.{ATTEMPT}.{rank}").exists():
        assert time.monotonic() < deadline, f"no {name} of rank {rank}"
        time.sleep(0.01)
def sleep_for_ever():
    while True:
        time.sleep(60)
"""


def eventually(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Wait until `condition` is true, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


class Launch:
    """One running tpu-launch."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, home: Path) -> None:
        self.notes = home / "notes"
        self.notes.mkdir(parents=True)
        self._out, self._err = home / "out", home / "err"
        self._out.touch()
        self._err.touch()
        self._token = uuid.uuid4().hex
        environment = {**env, _TOKEN: self._token, "NOTES": str(self.notes)}
        self._process = _CONTEXT.Process(
            target=_run, args=(argv, environment, str(cwd), str(self._out), str(self._err))
        )
        self._process.start()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait(self, seconds: float = DEADLINE) -> int:
        """Wait for the launcher and return its status, -N if signal N killed it."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still runs after {seconds} s: {self.stderr}"
        return self._process.exitcode

    @property
    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.exitcode is not None

    def signal(self, signum: signal.Signals) -> None:
        assert self._process.pid is not None
        if not self.ended:
            os.kill(self._process.pid, signum)

    def note(self, name: str, *, rank: int, attempt: int = 0) -> Any:
        """Return what a worker noted, as soon as it has."""
        path = self.notes / f"{name}.{attempt}.{rank}"
        eventually(path.exists, f"{name} of rank {rank}")
        return json.loads(path.read_text())

    def living(self) -> list[int]:
        """Return the living processes of this run, the launcher among them."""
        return [pid for pid in _pids() if self._is_ours(pid)]

    def kill_all(self) -> None:
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)
        self._process.join(DEADLINE)

    def _is_ours(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            # The launcher changed its environment after its start: it is known by its pid.
            return state not in "ZX" and (
                pid == self._process.pid
                or f"{_TOKEN}={self._token}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            )
        except OSError:
            return False


class Launches:
    """Starts launches for one test, and knows that nothing of them may be left after it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started: list[Launch] = []

    def script(self, name: str, body: str) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_PRELUDE + textwrap.dedent(body))
        return path

    def start(self, *argv: object, cwd: Path | None = None, **env: str) -> Launch:
        # No setting, thread count or TPU of whoever runs the tests reaches them.
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        launch = Launch(
            [str(argument) for argument in argv],
            {**inherited, "TMPDIR": str(self.home), **env},
            cwd or self.home,
            self.home / f"launch{len(self.started)}",
        )
        self.started.append(launch)
        return launch

    def run(self, *argv: object, cwd: Path | None = None, **env: str) -> tuple[int, Launch]:
        """Start a launch, wait for it, and check that it left no process."""
        launch = self.start(*argv, cwd=cwd, **env)
        status = launch.wait()
        assert launch.living() == []
        return status, launch


@contextmanager
def launches(home: Path) -> Iterator[Launches]:
    _CONTEXT.set_forkserver_preload(["tpu_dist.launch.cli", "tpu_dist.launch.run"])
    running = Launches(home)
    try:
        yield running
    finally:
        left = {launch: launch.living() for launch in running.started}
        for launch in left:
            launch.kill_all()
    assert not any(left.values()), f"a launch left processes: {list(left.values())}"


def _run(argv: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # Tests that run in the background of a shell would ignore it, and so would the launcher.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from tpu_dist.launch.cli import main

    status = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
