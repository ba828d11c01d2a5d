"""Runs that go well: what reaches the workers, and what reaches the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_harness import Launches, launches

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Launches]:
    with launches(tmp_path) as running:
        yield running


NOTE_ARGUMENTS = 'note("argv", sys.argv[1:])'


def test_arguments_after_the_script_arrive_untouched(runs: Launches) -> None:
    script = runs.script("train.py", NOTE_ARGUMENTS)
    arguments = [
        *("--tee", "3", "--nproc-per-node=7", "--max_restarts", "-m", "--help"),
        *("", "--", "a b", "$$", "${local_rank}", "$HOME", "*", "\\n", "ä", "[bold]"),
    ]
    status, launch = runs.run("--nproc-per-node", 2, script, *arguments)
    assert status == 0
    assert launch.note("argv", rank=0) == arguments
    assert launch.note("argv", rank=1) == arguments


def test_workers_know_their_place_and_reach_the_store(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        import socket
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=5).close()
        note("environment", dict(os.environ))
        """,
    )
    status, launch = runs.run("--nproc_per_node=3", "--rdzv-id", "job7", script)
    assert (status, launch.stdout) == (0, "")
    for rank in range(3):
        environment = launch.note("environment", rank=rank)
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "job7",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 3)),
        }
        assert {name: environment.get(name) for name in expected} == expected
        # What we do to torchelastic's signal handlers in the launcher stays there.
        assert environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert launch.stderr.count("OMP_NUM_THREADS") == 1


def test_a_chosen_thread_count_is_kept_in_silence(runs: Launches) -> None:
    script = runs.script("train.py", 'note("threads", os.environ["OMP_NUM_THREADS"])')
    status, launch = runs.run("--nproc-per-node=2", script, OMP_NUM_THREADS="5")
    assert (status, launch.stderr) == (0, "")
    assert launch.note("threads", rank=1) == "5"


def test_settings_come_from_the_environment_too(runs: Launches) -> None:
    script = runs.script("train.py", 'note("size", os.environ["WORLD_SIZE"])')
    status, launch = runs.run(script, TPU_LAUNCH_NPROC_PER_NODE="2")
    assert status == 0
    assert launch.note("size", rank=1) == "2"


def test_a_module_of_the_working_directory_runs(runs: Launches) -> None:
    runs.script("project/jobs/__init__.py", "raise SystemExit('only the worker may import this')")
    (runs.home / "project/jobs/__init__.py").write_text("")
    runs.script("project/jobs/train.py", NOTE_ARGUMENTS)
    status, launch = runs.run(
        *("--nproc-per-node", 2, "-m", "jobs.train", "-m", "x"), cwd=runs.home / "project"
    )
    assert status == 0
    assert launch.note("argv", rank=1) == ["-m", "x"]


def test_a_script_in_a_path_with_spaces_runs(runs: Launches) -> None:
    runs.script("my jobs/train it.py", NOTE_ARGUMENTS)
    status, launch = runs.run("--nproc-per-node=2", "my jobs/train it.py", "a b")
    assert status == 0
    assert launch.note("argv", rank=1) == ["a b"]


def test_a_command_runs_without_python_and_with_usual_signals(runs: Launches) -> None:
    command = runs.home / "job.sh"
    command.write_text('#!/bin/sh\ngrep SigIgn /proc/self/status > "$NOTES/ignored"\necho "$1"\n')
    command.chmod(0o755)
    status, launch = runs.run("--no-python", "./job.sh", "a b")
    assert (status, launch.stdout) == (0, "a b\n")
    ignored = int((launch.notes / "ignored").read_text().split()[1], 16)
    # What runs us may ignore signals of its own, as a shell in the background does. But SIGPIPE and
    # SIGXFSZ are what Python ignores, and other programs rely on.
    inherited = _ignored_here() & ~_mask(signal.SIGPIPE, signal.SIGXFSZ)
    assert ignored & ~inherited == 0


def _ignored_here() -> int:
    (line,) = re.findall(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    return int(line, 16)


def _mask(*signums: signal.Signals) -> int:
    return sum(1 << (signum - 1) for signum in signums)


def test_launches_side_by_side_do_not_meet(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        note("port", os.environ["MASTER_PORT"])
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
        """,
    )
    gate = runs.home / "gate"
    pair = [runs.start("--nproc-per-node=2", script, gate) for _ in range(2)]
    ports = [[launch.note("port", rank=rank) for rank in range(2)] for launch in pair]
    gate.touch()
    assert [launch.wait() for launch in pair] == [0, 0]
    (first, also_first), (second, also_second) = ports
    assert first == also_first and second == also_second and first != second


def test_output_has_no_prefix_unless_teed(runs: Launches) -> None:
    script = runs.script("train.py", 'print("out", flush=True); print("err", file=sys.stderr)')
    status, launch = runs.run("--nproc-per-node=1", script)
    assert (status, launch.stdout, launch.stderr) == (0, "out\n", "err\n")
    logs = runs.home / "logs"
    status, launch = runs.run(
        *("--nproc-per-node=2", "--tee=3", "--log-dir", logs, "--role=trainer", script)
    )
    assert status == 0
    assert sorted(launch.stdout.splitlines()) == ["[trainer0]:out", "[trainer1]:out"]
    assert "[trainer0]:err" in launch.stderr.splitlines()
    files = sorted(logs.glob("*/attempt_0/*/*.log"))
    assert [file.read_text() for file in files] == ["err\n", "out\n"] * 2


def test_only_filtered_ranks_write_to_the_terminal(runs: Launches) -> None:
    script = runs.script("train.py", "print(RANK, flush=True)")
    status, launch = runs.run("--nproc-per-node=3", "--local-ranks-filter=0,2", script)
    assert status == 0
    assert sorted(launch.stdout.split()) == ["0", "2"]


@pytest.mark.parametrize("tee", ["0", "1"])
def test_huge_output_arrives_whole(runs: Launches, tee: str) -> None:
    script = runs.script(
        "train.py",
        """
        line = " {} " + "x" * 90 + "\\n"
        sys.stdout.write("".join(str(RANK) + line.format(i) for i in range(50_000)))
        """,
    )
    status, launch = runs.run("--nproc-per-node=2", "--tee", tee, "--log-dir=logs", script)
    assert status == 0
    prefix = {"0": "{}", "1": "[default{}]:{}"}[tee]
    lines = launch.stdout.splitlines()
    for rank in range(2):
        start = prefix.format(rank, rank) + " "
        assert sum(line.startswith(start) for line in lines) == 50_000
    assert len(lines) == 100_000


def test_no_temporary_directory_is_left(runs: Launches) -> None:
    script = runs.script("train.py", "")
    before = sorted(runs.home.iterdir())
    status, _ = runs.run(script)
    assert status == 0
    assert sorted(set(runs.home.iterdir()) - set(before)) == [runs.home / "launch0"]


def test_workers_form_a_group_and_again_after_a_restart(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([1.0 + RANK])
        dist.all_reduce(total)
        note("total", total.item())
        if ATTEMPT == 0 and RANK == 1:
            wait_for("total", 0)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier() if ATTEMPT else sleep_for_ever()
        dist.destroy_process_group()
        """,
    )
    launch = runs.start(
        *("--nproc-per-node=2", "--max-restarts=1", script),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        OMP_NUM_THREADS="1",
    )
    assert launch.wait(50) == 0
    for attempt in range(2):
        assert launch.note("total", rank=0, attempt=attempt) == 3.0


def test_the_real_command_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys; sys.exit(40 + int(os.environ['WORLD_SIZE']))")
    done = subprocess.run(
        [sys.executable, "-m", "tpu_dist.launch", "--nproc-per-node=1", str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=50,
        text=True,
    )
    assert done.returncode == 41, done.stderr
    assert "rank 0 exited with status 41" in done.stderr
    assert json.dumps(done.stdout) == '""'
