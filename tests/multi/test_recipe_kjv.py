"""The King James recipe on two real processes: learns, resumes exactly, and ends when it should.

RECIPE_TEST_BACKEND chooses another backend, such as gloo.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BACKEND = os.environ.get("RECIPE_TEST_BACKEND", "tpu_dist")
DEVICE = "cpu" if BACKEND == "gloo" else "tpu"

pytestmark = [
    pytest.mark.skipif(
        find_spec("bible") is None or find_spec("tokenizers") is None,
        reason="needs the recipes extra",
    ),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes in /proc"),
    pytest.mark.timeout(600),
]

NUM_STEPS = 120
SAVE_EVERY = 20
LAUNCH_SECONDS = 180
END_SECONDS = 20

TINY = (
    *("--num-steps", str(NUM_STEPS), "--save-every", str(SAVE_EVERY), "--log-every", "1"),
    *("--dim", "32", "--num-layers", "2", "--num-heads", "2", "--hidden-dim", "64"),
    *("--sequence-length", "32", "--global-batch-size", "8", "--learning-rate", "0.01"),
    *("--vocabulary-size", "512", "--held-out-every", "600", "--sample-tokens", "8"),
    *("--timeout", "60"),
)


class Launched:
    """A launcher and its workers; all are gone when the block that started them ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def workers(self) -> dict[int, int]:
        """Process ids of the workers, by rank."""
        found = {}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for pid in map(int, children.read_text().split()):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            for entry in environment:
                if entry.startswith(b"RANK="):
                    found[int(entry.removeprefix(b"RANK="))] = pid
        return found

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, *, seconds: float) -> subprocess.CompletedProcess[str]:
        out, err = self._process.communicate(timeout=seconds)
        return subprocess.CompletedProcess([], self._process.returncode, out, err)

    def wait_until(self, condition: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process.poll() is not None:
                pytest.fail(f"it ended while being waited for: {self.wait(seconds=5)}")
            assert time.monotonic() < deadline, "it did not come so far in time"
            time.sleep(0.01)

    def close(self) -> None:
        if self._process.poll() is None:
            for pid in (*self.workers().values(), self._process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        self._process.communicate(timeout=END_SECONDS)


@contextmanager
def launched(run_dir: Path, *arguments: str, num_processes: int = 2) -> Iterator[Launched]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_processes), "-m", "tpu_dist.recipes.kjv"),
        *(
            "--backend",
            BACKEND,
            "--device",
            DEVICE,
            "--run-dir",
            str(run_dir),
            "--json",
            f"{run_dir}.jsonl",
        ),
        *arguments,
    ]
    process = Launched(
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
    )
    try:
        yield process
    finally:
        process.close()


def complete(
    run_dir: Path, *arguments: str, num_processes: int = 2
) -> subprocess.CompletedProcess[str]:
    with launched(run_dir, *arguments, num_processes=num_processes) as process:
        return process.wait(seconds=LAUNCH_SECONDS)


def reported(run_dir: Path, event: str = "step") -> list[dict[str, Any]]:
    lines = Path(f"{run_dir}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; where a step was taken twice, the later."""
    return {r["step"]: (r["loss"], r["gradient_norm"]) for r in reported(run_dir)}


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recipe") / "uninterrupted"
    result = complete(run_dir, *TINY)
    assert result.returncode == 0, result.stderr
    (run_dir.parent / "stdout").write_text(result.stdout)
    return run_dir


def copy_of(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to)
    shutil.copy(f"{run_dir}.jsonl", f"{to}.jsonl")
    return to


def test_it_learns(uninterrupted: Path) -> None:
    found = losses(uninterrupted)
    assert list(found) == list(range(1, NUM_STEPS + 1))
    last = [found[step][0] for step in range(NUM_STEPS - 9, NUM_STEPS + 1)]
    assert 6.0 < found[1][0] < 6.5
    assert sum(last) / len(last) < 5.0
    (validation,) = reported(uninterrupted, "validation")
    assert validation["loss"] < 5.2


def test_it_says_what_it_does(uninterrupted: Path) -> None:
    lines = (uninterrupted.parent / "stdout").read_text().splitlines()
    (note,) = (line for line in lines if "M parameters" in line)
    assert f"2 processes, backend {BACKEND}, device {DEVICE}" in note
    assert sum(line.startswith("step ") for line in lines) == NUM_STEPS
    assert any(line.startswith("validation  loss ") for line in lines)
    assert lines[lines.index("sample:") + 1].startswith("In the beginning")


def test_it_keeps_the_newest_checkpoints_alone(uninterrupted: Path) -> None:
    newest = (NUM_STEPS - SAVE_EVERY, NUM_STEPS)
    assert checkpoints(uninterrupted) == [f"step-{step:08d}" for step in newest]


def test_a_killed_run_resumes_with_exactly_the_losses_it_would_have_had(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    with launched(run_dir, *TINY) as process:
        first = run_dir / "checkpoints" / f"step-{SAVE_EVERY:08d}"
        process.wait_until(first.is_dir, seconds=LAUNCH_SECONDS)
        os.kill(process.workers()[1], signal.SIGKILL)
        assert process.wait(seconds=LAUNCH_SECONDS).returncode != 0
    killed_at = max(losses(run_dir))
    assert killed_at < NUM_STEPS

    # What a save that was cut off leaves behind, under the name of a later step.
    unfinished = run_dir / "checkpoints" / f"step-{NUM_STEPS - 1:08d}.partial"
    unfinished.mkdir()
    (unfinished / ".metadata").write_bytes(b"half")

    Path(f"{run_dir}.jsonl").unlink()
    result = complete(run_dir, *TINY, "--resume")
    assert result.returncode == 0, result.stderr
    resumed = losses(run_dir)
    assert SAVE_EVERY < min(resumed) <= killed_at + 1
    assert (min(resumed) - 1) % SAVE_EVERY == 0
    reference = losses(uninterrupted)
    assert resumed == {step: reference[step] for step in range(min(resumed), NUM_STEPS + 1)}
    assert reported(run_dir, "validation") == reported(uninterrupted, "validation")
    assert not unfinished.exists()


def test_two_hosts_go_on_from_the_checkpoint_when_one_of_them_is_killed(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "pod"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def host(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tpu_dist.launch", "--nnodes=2", "--max-restarts=2"),
                *(f"--rdzv-endpoint=127.0.0.1:{port}", f"--node-name={name}"),
                *("-m", "tpu_dist.recipes.kjv", "--backend", BACKEND, "--device", DEVICE),
                *("--run-dir", str(run_dir), "--json", f"{run_dir}.jsonl", "--resume", *TINY),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )

    hosts = {name: Launched(host(name)) for name in "ab"}
    lost = hosts["b"]
    try:
        first = run_dir / "checkpoints" / f"step-{SAVE_EVERY:08d}"
        hosts["a"].wait_until(first.is_dir, seconds=LAUNCH_SECONDS)
        lost.send(signal.SIGKILL)  # its worker dies with it
        hosts["b"] = Launched(host("b"))
        results = {name: each.wait(seconds=LAUNCH_SECONDS) for name, each in hosts.items()}
    finally:
        for each in (*hosts.values(), lost):
            each.close()
    assert [result.returncode for result in results.values()] == [0, 0], results
    assert "host b is lost" in results["a"].stderr
    assert losses(run_dir) == losses(uninterrupted)


def test_a_run_resumes_on_another_number_of_processes(uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "fewer")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{NUM_STEPS:08d}")
    Path(f"{run_dir}.jsonl").unlink()
    result = complete(run_dir, *TINY, "--resume", num_processes=1)
    assert result.returncode == 0, result.stderr
    resumed, reference = losses(run_dir), losses(uninterrupted)
    assert min(resumed) == NUM_STEPS - SAVE_EVERY + 1
    for step, (loss, _) in resumed.items():
        assert loss == pytest.approx(reference[step][0], rel=1e-3)


@pytest.mark.slow
def test_accumulating_gradients_gives_the_same_losses(uninterrupted: Path, tmp_path: Path) -> None:
    shorter = ("--num-steps", "8", "--save-every", "0", "--sample-tokens", "0")
    many, one = tmp_path / "many", tmp_path / "one"
    for run_dir, steps in ((one, "1"), (many, "4")):
        result = complete(run_dir, *TINY, *shorter, "--accumulation-steps", steps)
        assert result.returncode == 0, result.stderr
    for step, (loss, norm) in losses(one).items():
        assert losses(many)[step] == pytest.approx((loss, norm), rel=1e-3)


def test_other_settings_are_refused_with_the_difference(
    uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = copy_of(uninterrupted, tmp_path / "other")
    result = complete(run_dir, *TINY, "--resume", "--dim", "64")
    assert result.returncode != 0
    assert "--dim: the run has 32, you asked for 64" in result.stderr


def test_a_run_is_not_overwritten(uninterrupted: Path) -> None:
    before = checkpoints(uninterrupted), losses(uninterrupted)
    result = complete(uninterrupted, *TINY)
    assert result.returncode != 0
    assert "holds a run already" in result.stderr
    assert (checkpoints(uninterrupted), losses(uninterrupted)) == before


def test_a_run_that_diverges_stops_and_names_the_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "diverging"
    result = complete(
        run_dir, *TINY, "--learning-rate", "1e30", "--warmup-ratio", "0", "--log-every", "5"
    )
    assert result.returncode != 0
    assert "error: step 2 has loss " in result.stderr
    assert list(losses(run_dir)) == [1]
    assert checkpoints(run_dir) == []


def test_ctrl_c_ends_it_promptly(tmp_path: Path) -> None:
    run_dir = tmp_path / "interrupted"
    with launched(run_dir, *TINY, "--num-steps", "100000") as process:
        first = run_dir / "checkpoints" / f"step-{SAVE_EVERY:08d}"
        process.wait_until(first.is_dir, seconds=LAUNCH_SECONDS)
        workers = process.workers()
        assert sorted(workers) == [0, 1]
        process.send(signal.SIGINT)
        assert process.wait(seconds=END_SECONDS).returncode != 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
