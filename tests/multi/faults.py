"""Faults of all kinds, at random moments, on a run of 4 hosts with 2 workers each.

    python tests/multi/faults.py --write docs/faults.md

Each fault must end in a training that is completed or in an error that names what failed; nothing
may hang, and no process may be left. The workers train without torch: at each step they wait for
each other, as a collective does, and rank 0 keeps a checkpoint, from which a new attempt goes on.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch_harness import Launch, eventually
from pods import Pods, pods, send

NAMES = ("a", "b", "c", "d")
STEPS = 30
LIMIT = 90.0  # s, for a run to come to its end, on a machine that is busy

# A worker that waits for a peer for 3 s says which one, as a process group's timeout does.
TRAINING = f"""
WORLD, HOME = int(os.environ["WORLD_SIZE"]), NOTES.parent.parent
CHECKPOINT, BARRIER = HOME / "checkpoint", HOME / f"barrier{{ATTEMPT}}"
BARRIER.mkdir(exist_ok=True)
first = step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
note("pid", os.getpid())
while step < {STEPS}:
    step += 1
    time.sleep(0.03)
    (BARRIER / f"{{step}}.{{RANK}}").touch()
    for peer in range(WORLD):
        deadline = time.monotonic() + 3
        while not (BARRIER / f"{{step}}.{{peer}}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {{step}}: rank {{peer}} did not come")
            time.sleep(0.005)
    if RANK == 0:
        new = CHECKPOINT.with_suffix(".new")
        new.write_text(str(step))
        new.rename(CHECKPOINT)
note("trained", [first, step])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run with a fault ended."""

    fault: str
    moment: float
    ended: str
    seconds: float


@dataclass(slots=True)
class Run:
    """A run of four hosts, in which something is about to fail."""

    pod: Pods
    random: random.Random
    hosts: dict[str, Launch]
    max_restarts: int
    script: Path

    def start(self, name: str) -> None:
        """Start a host, also in the place of one that is gone."""
        self.hosts[name] = self.pod.start(
            name,
            "--nproc-per-node=2",
            f"--max-restarts={self.max_restarts}",
            "--shutdown-timeout=1",
            "--rdzv-conf=join_timeout=20",
            self.script,
            hosts=len(NAMES),
        )

    def one(self) -> Launch:
        """Return one of the hosts."""
        return self.hosts[self.random.choice(NAMES)]

    def workers(self, launch: Launch) -> list[int]:
        """Return the workers of a host that have begun, of its last attempt."""
        notes = sorted(launch.notes.glob("pid.*"), key=lambda note: note.stat().st_mtime)
        pids = [int(note.read_text()) for note in notes if note.suffix != ".new"]
        return [pid for pid in pids if pid in launch.living()]

    def signal_worker(self, signum: signal.Signals) -> None:
        """Send a signal to one of the workers."""
        launch = self.one()
        pids = eventually(lambda: self.workers(launch) or launch.ended, "a worker runs")
        if isinstance(pids, list):
            send(self.random.choice(pids), signum)

    def replace(self, name: str, signum: signal.Signals) -> None:
        """End a host's launcher, and start another in its place."""
        self.hosts[name].signal(signum)
        self.hosts[name].wait()
        self.start(name)


def _worker(signum: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.signal_worker(signum)


def _several_workers(run: Run) -> None:
    for _ in range(3):
        run.signal_worker(signal.SIGKILL)


def _end_launcher(signum: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.one().signal(signum)


def _replace(*names: str, signum: signal.Signals = signal.SIGKILL) -> Callable[[Run], None]:
    def do(run: Run) -> None:
        for name in names or (run.random.choice(NAMES),):
            run.replace(name, signum)

    return do


def _hang(seconds: float) -> Callable[[Run], None]:
    def do(run: Run) -> None:
        launch = run.one()
        launch.signal(signal.SIGSTOP)
        time.sleep(seconds)
        launch.signal(signal.SIGCONT)

    return do


def _service(signum: signal.Signals) -> Callable[[Run], None]:
    def do(run: Run) -> None:
        for pid in run.pod.services():
            send(pid, signum)
            if signum == signal.SIGSTOP:
                time.sleep(2)
                send(pid, signal.SIGCONT)

    return do


def _service_and_worker(run: Run) -> None:
    for pid in run.pod.services():
        send(pid, signal.SIGKILL)
    run.signal_worker(signal.SIGKILL)


def _twice(run: Run) -> None:
    # It is refused while the other is there; when the run has ended it waits for one in vain.
    wait = "--rdzv-conf=join_timeout=5"
    run.pod.start("b", "--nproc-per-node=2", wait, run.script, hosts=len(NAMES))


def _junk(run: Run) -> None:
    for _ in range(20):
        try:
            with socket.create_connection(("127.0.0.1", run.pod.port), timeout=1) as connection:
                connection.sendall(run.random.randbytes(2048))
        except OSError:
            pass  # nobody listens yet, or it was cut off, as it should be


# By name: what is done, and how many restarts the run has.
FAULTS: Mapping[str, tuple[Callable[[Run], None], int]] = {
    "a worker is killed": (_worker(signal.SIGKILL), 1),
    "a worker crashes": (_worker(signal.SIGSEGV), 1),
    "a worker hangs": (_worker(signal.SIGSTOP), 1),
    "a worker is killed, no restart left": (_worker(signal.SIGKILL), 0),
    "three workers are killed": (_several_workers, 3),
    "a launcher is killed, another comes": (_replace(), 1),
    "the first host's launcher is killed, another comes": (_replace("a"), 1),
    "two launchers are killed, others come": (_replace("b", "c"), 2),
    "a launcher is killed, none comes": (_end_launcher(signal.SIGKILL), 0),
    "a launcher is killed, none comes in time": (_end_launcher(signal.SIGKILL), 1),
    "a launcher gets SIGTERM, another comes": (_replace(signum=signal.SIGTERM), 1),
    "a launcher gets Ctrl-C": (_end_launcher(signal.SIGINT), 0),
    "a launcher hangs for 1 s": (_hang(1), 1),
    "a launcher hangs for 9 s": (_hang(9), 1),
    "the service is killed": (_service(signal.SIGKILL), 0),
    "the service hangs for 2 s": (_service(signal.SIGSTOP), 0),
    "the service and a worker are killed": (_service_and_worker, 2),
    "a host comes twice": (_twice, 0),
    "strangers send junk": (_junk, 0),
}


def run_fault(pod: Pods, name: str, seed: int) -> Outcome:
    """Run a training with a fault in it, and look how it ended; raises where that is not well."""
    fault, max_restarts = FAULTS[name]
    chance = random.Random(f"{name} {seed}")
    run = Run(pod, chance, {}, max_restarts, pod.script(TRAINING))
    started = time.monotonic()
    for host in chance.sample(NAMES, len(NAMES)):
        run.start(host)
    moment = chance.uniform(0.2, 3)  # from before they have met to the middle of the training
    time.sleep(moment)
    fault(run)
    deadline = started + LIMIT
    statuses = {}
    for host, launch in run.hosts.items():
        statuses[host] = launch.wait(max(1.0, deadline - time.monotonic()))
    seconds = time.monotonic() - started
    pod.nothing_is_left()
    return Outcome(fault=name, moment=moment, ended=_ended(run, statuses), seconds=seconds)


def _ended(run: Run, statuses: Mapping[str, int]) -> str:
    checkpoint = run.pod.runs.home / "checkpoint"
    if all(status == 0 for status in statuses.values()):
        assert checkpoint.read_text() == str(STEPS)
        attempts = len(list(run.pod.runs.home.glob("barrier*")))
        return "trained" + (f", {attempts} attempts" if attempts > 1 else "")
    # Whoever was not ended by the fault itself says why it ended, and all say the same.
    reasons = set()
    for host, status in statuses.items():
        if status in (-signal.SIGKILL, 128 + signal.SIGINT):
            continue
        assert status > 0, f"host {host} ended with {status}, the others with {statuses}"
        said = run.hosts[host].stderr.splitlines()
        found = [line for line in said if line.startswith("tpu-launch: ") and _names(line)]
        assert found, f"host {host} names nothing:\n" + "\n".join(said)
        reasons.add(found[-1].removeprefix("tpu-launch: ").removeprefix("error: "))
    assert len(reasons) == 1, reasons
    return reasons.pop()


def _names(line: str) -> bool:
    return any(word in line for word in ("is lost", "rank ", "hosts came within"))


def main() -> int:
    """Run each fault, some of them twice, and print the table."""
    parser = argparse.ArgumentParser(description="Faults at random moments.")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--write", type=Path, help="write the table there")
    parser.add_argument("-k", default="", help="only faults with this in their name")
    arguments = parser.parse_args()
    names = [name for name in FAULTS if arguments.k in name]
    rows, failed = [], 0
    for number in range(arguments.first, arguments.first + arguments.count):
        name = names[number % len(names)]
        with tempfile.TemporaryDirectory() as home:
            try:
                with pods(Path(home)) as pod:
                    outcome = run_fault(pod, name, number)
                took = f"{outcome.seconds:.0f} s"
                row = f"| {name} | {outcome.moment:.1f} s | {outcome.ended} | {took} |"
            except AssertionError as error:
                failed += 1
                row = f"| {name} | | FAILED: {str(error)[:2000]} | |"
        rows.append(row)
        print(row, flush=True)
    if arguments.write is not None:
        text = arguments.write.read_text()
        head = text[: text.index("| fault |")]
        table = "| fault | after | how it ended | took |\n| --- | --- | --- | --- |\n"
        arguments.write.write_text(head + table + "\n".join(rows) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
