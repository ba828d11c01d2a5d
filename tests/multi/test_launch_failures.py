"""Runs that fail: status, report, restarts, and that the others end too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_harness import Launches, launches

pytestmark = pytest.mark.timeout(60)

# What torchelastic's record() writes, without torch's import.
RECORD = """
def record(message):
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(
        {"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": "0"}}}
    ))
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Launches]:
    with launches(tmp_path) as running:
        yield running


def test_the_status_is_that_of_the_worker_that_failed(runs: Launches) -> None:
    script = runs.script("train.py", "sys.exit(7) if RANK == 1 else sleep_for_ever()")
    status, launch = runs.run("--nproc-per-node=2", script)
    assert status == 7
    report = launch.stderr
    assert "tpu-launch: rank 1 exited with status 7\n" in report
    assert "rank 1 (local rank 1), pid " in report
    assert "1 other worker was ended by the launcher" in report
    assert "Traceback" not in report
    assert len(report.splitlines()) <= 8


def test_a_killed_worker_ends_the_run_and_is_reported(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        note("pid", os.getpid())
        if RANK == 2:
            wait_for("pid", 0)
            os.kill(os.getpid(), signal.SIGKILL)
        sleep_for_ever()
        """,
    )
    status, launch = runs.run("--nproc-per-node=3", script)
    assert status == 128 + 9
    pid = launch.note("pid", rank=2)
    assert "rank 2 killed by SIGKILL (signal 9)" in launch.stderr
    assert f"pid {pid}, host " in launch.stderr
    assert "memory" in launch.stderr
    assert "2 other workers were ended" in launch.stderr


def test_the_root_cause_is_the_first_failure_also_within_one_look(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        if RANK == 1:
            note("failed")
            os._exit(3)
        wait_for("failed", 1)
        time.sleep(0.05)
        os._exit(4)
        """,
    )
    status, launch = runs.run("--nproc-per-node=2", "--monitor-interval=1", script)
    assert status == 3
    assert "rank 1 exited with status 3" in launch.stderr
    assert "rank 0 exited with status 4 0." in launch.stderr


def test_the_recorded_exception_is_reported_and_decides_who_was_first(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        RECORD
        + """
if RANK == 1:
    record("RuntimeError: chip 3 lost its ICI link [x]")
    note("recorded")
    wait_for("dying", 0)
    time.sleep(0.2)  # its process is still being torn down while its peers die
else:
    wait_for("recorded", 1)
    note("dying")
sys.exit(1)
""",
    )
    error_file = runs.home / "error.json"
    status, launch = runs.run(
        *("--nproc-per-node=2", "--monitor-interval=1", script),
        TORCHELASTIC_ERROR_FILE=str(error_file),
    )
    assert status == 1
    assert "rank 1 exited with status 1" in launch.stderr
    assert "error   RuntimeError: chip 3 lost its ICI link [x]\n" in launch.stderr
    assert "chip 3" in json.loads(error_file.read_text())["message"]["message"]


def test_a_broken_error_file_does_not_hide_the_failure(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        'pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("{"); sys.exit(5)',
    )
    status, launch = runs.run(script)
    assert status == 5
    assert "rank 0 exited with status 5" in launch.stderr
    assert "Traceback" not in launch.stderr


def test_the_end_of_a_redirected_stderr_is_in_the_report(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        for line in range(5000):
            print("line", line, file=sys.stderr)
        raise ValueError("bad step")
        """,
    )
    status, launch = runs.run("--redirects=3", "--log-dir=logs", script)
    assert status == 1
    assert "ValueError: bad step" in launch.stderr
    assert len(launch.stderr.splitlines()) < 20
    (log,) = (runs.home / "logs").glob("*/attempt_0/0/stderr.log")
    assert str(log.relative_to(runs.home)) in launch.stderr


def test_run_path_records_what_the_script_raises(runs: Launches) -> None:
    runs.script("beside.py", "VALUE = 'found beside the script'")
    script = runs.script(
        "train.py",
        "import beside; assert __name__ == '__main__'; raise ValueError(beside.VALUE, sys.argv)",
    )
    status, launch = runs.run("--run-path", script, "a b", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert status == 1
    assert "error   ValueError: ('found beside the script', ['" in launch.stderr
    assert "'a b'])" in launch.stderr


def test_a_restart_starts_all_anew_and_counts(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        print("attempt", ATTEMPT, flush=True)
        note("port", os.environ["MASTER_PORT"])
        if ATTEMPT == 2:
            sys.exit(0)
        sys.exit(9) if RANK == 0 else sleep_for_ever()
        """,
    )
    status, launch = runs.run(
        *("--nproc-per-node=2", "--max-restarts=3", "--redirects=1", "--log-dir=logs", script)
    )
    assert status == 0
    assert "rank 0 (pid " in launch.stderr
    assert "(restart 1 of 3)" in launch.stderr and "(restart 2 of 3)" in launch.stderr
    assert "(restart 3 of 3)" not in launch.stderr
    for attempt in range(3):
        (log,) = (runs.home / "logs").glob(f"*/attempt_{attempt}/0/stdout.log")
        assert log.read_text() == f"attempt {attempt}\n"
    ports = {launch.note("port", rank=0, attempt=attempt) for attempt in range(3)}
    assert len(ports) == 3  # a store per round: no key of the last one is left


def test_restarts_run_out(runs: Launches) -> None:
    script = runs.script("train.py", "sys.exit(9) if RANK == 0 else sleep_for_ever()")
    status, launch = runs.run("--nproc-per-node=2", "--max-restarts=1", script)
    assert status == 9
    assert launch.stderr.count("starting all workers anew") == 1
    assert "after 1 restart\n" in launch.stderr


def test_what_a_failed_worker_had_started_is_ended_too(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        if RANK == 0:
            child = subprocess.Popen(["sleep", "300"])
            note("child", child.pid)
            os.kill(os.getpid(), signal.SIGKILL)
        sleep_for_ever()
        """,
    )
    started = time.monotonic()
    status, launch = runs.run("--nproc-per-node=2", script)
    assert status == 137
    assert launch.note("child", rank=0)
    assert time.monotonic() - started < 10  # of a grace of 30 s: nobody was waited for in vain


def test_the_others_get_the_configured_grace_and_no_more(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        if RANK == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("deaf")
            sleep_for_ever()
        wait_for("deaf", 1)
        sys.exit(6)
        """,
    )
    started = time.monotonic()
    status, _ = runs.run("--nproc-per-node=2", "--shutdown-timeout=0.5", script)
    assert status == 6
    assert 0.5 < time.monotonic() - started < 10


def test_a_worker_can_end_its_work_within_the_grace(runs: Launches) -> None:
    script = runs.script(
        "train.py",
        """
        def save(*_):
            time.sleep(0.3)
            note("saved")
            sys.exit(0)
        if RANK == 1:
            signal.signal(signal.SIGTERM, save)
            note("ready")
            sleep_for_ever()
        wait_for("ready", 1)
        sys.exit(6)
        """,
    )
    status, launch = runs.run("--nproc-per-node=2", script)
    assert status == 6
    launch.note("saved", rank=1)


def test_a_run_that_cannot_start_says_so_at_once(runs: Launches) -> None:
    status, launch = runs.run("--nproc-per-node=2", "nowhere.py")
    assert status == 2
    assert launch.stderr.startswith("tpu-launch: error: script 'nowhere.py': no such file in ")
    script = runs.script("train.py", 'note("ran")')
    status, launch = runs.run("--log-dir", script, script)
    assert status == 2
    assert "--log-dir" in launch.stderr
    assert not list(launch.notes.iterdir())
