"""Runs on several hosts, in tests: each a tpu-launch of its own on this machine."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch_harness import DEADLINE, Launch, Launches, eventually, launches

import tpu_dist

_ROOT = str(Path(tpu_dist.__file__).parents[1])  # the service is a process of its own


class Pods:
    """Starts the hosts of one run."""

    def __init__(self, runs: Launches) -> None:
        self.runs = runs
        self.port = _free_port()

    def script(self, body: str) -> Path:
        return self.runs.script("train.py", body)

    def start(self, name: str, *argv: object, hosts: int = 2, **env: str) -> Launch:
        return self.runs.start(
            f"--nnodes={hosts}",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            f"--node-name={name}",
            *argv,
            PYTHONPATH=_ROOT,
            **env,
        )

    def run(
        self, *argv: object, names: tuple[str, ...] = ("b", "a"), **env: str
    ) -> dict[str, Launch]:
        """Start all hosts, in this order, and wait for them; their statuses are in `status`."""
        hosts = {name: self.start(name, *argv, hosts=len(names), **env) for name in names}
        self.status = {name: launch.wait() for name, launch in hosts.items()}
        self.nothing_is_left()
        return hosts

    def nothing_is_left(self) -> None:
        """Wait until no process of the run is left, the service included."""
        for launch in self.runs.started:
            eventually(lambda launch=launch: launch.living() == [], f"{launch.living()} end")

    def services(self) -> list[int]:
        """Return the pids of the run's rendezvous service: one, or none."""
        pids = {pid for launch in self.runs.started for pid in launch.living()}
        return [pid for pid in pids if b"tpu_dist.launch.service" in _command(pid)]


@contextmanager
def pods(home: Path) -> Iterator[Pods]:
    with launches(home) as runs:
        yield Pods(runs)


def said(launch: Launch, text: str, seconds: float = DEADLINE) -> None:
    """Wait until a launcher has said something."""
    eventually(lambda: text in launch.stderr, f"{text!r} in:\n{launch.stderr}", seconds)


def stop(launch: Launch) -> None:
    """Stop a launcher as a machine that hangs does."""
    launch.signal(signal.SIGSTOP)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def send(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass
