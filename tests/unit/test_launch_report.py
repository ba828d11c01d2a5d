"""Which failure is the root cause, and what the report says of it."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from tpu_dist.launch.failure import RoundFailure, describe_exit, describe_failure, exit_status
from tpu_dist.launch.processes import WorkerExit
from tpu_dist.launch.report import failure_report, restart_message


def ended(rank: int, exit_code: int, at: float, *, asked: bool = False) -> WorkerExit:
    return WorkerExit(
        rank=rank + 8,  # the second host's
        local_rank=rank,
        pid=1000 + rank,
        exit_code=exit_code,
        at=at,
        ran_for=timedelta(seconds=at),
        asked=asked,
    )


def report(failure: RoundFailure, restarts: int = 0) -> str:
    return failure_report(failure, host="host-1", restarts=restarts).plain


def test_the_first_to_fail_is_the_root() -> None:
    failure = describe_failure(
        [
            ended(2, 0, 1.0),
            ended(1, -9, 2.0),
            ended(0, 1, 2.5),
            ended(3, -15, 3.0, asked=True),
        ],
        error_files={},
        logs={},
    )
    assert failure.root.end.local_rank == 1
    assert [end.local_rank for end in failure.others] == [0]
    assert failure.num_ended == 1
    assert report(failure) == (
        "tpu-launch: rank 9 killed by SIGKILL (signal 9)\n"
        "  worker  rank 9 (local rank 1), pid 1001, host host-1, 2.0 s after its start\n"
        "  others  rank 8 exited with status 1 0.5 s later; "
        "1 other worker was ended by the launcher\n"
        "  to do   somebody sent SIGKILL, most often the kernel as memory ran out: see `dmesg`, "
        "or the container's memory limit"
    )


def test_a_recorded_error_counts_from_when_it_was_written(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text(json.dumps({"message": {"message": "ValueError: [a]\nmore"}}))
    os.utime(error_file, (1.5, 1.5))
    failure = describe_failure(
        [ended(0, 1, 2.0), ended(1, 1, 3.0)],
        error_files={0: tmp_path / "none.json", 1: error_file},
        logs={1: (tmp_path / "stdout.log",)},
    )
    assert failure.root.end.local_rank == 1
    text = report(failure, restarts=2)
    assert "  error   ValueError: [a]\n          more\n" in text
    assert f"  log     {tmp_path}/stdout.log\n" in text
    assert "3.0 s after its start, after 2 restarts\n" in text
    line = restart_message(failure, restart=1, max_restarts=3)
    assert line == (
        "rank 9 (pid 1001) exited with status 1 after 3.0 s: ValueError: [a]; "
        "starting all workers anew (restart 1 of 3)"
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": {}}', '{"other": 1}', "\xff"])
def test_error_files_that_cannot_be_read_are_passed_over(tmp_path: Path, content: str) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text(content, encoding="latin-1")
    failure = describe_failure([ended(0, 3, 1.0)], error_files={0: error_file}, logs={})
    assert failure.root.message is None
    assert "see its output above" in report(failure)


def test_the_end_of_stderr_is_shown_where_it_went_to_a_file(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(b"early\n" * 10_000 + b"\xff last but one\n\nlast\n")
    failure = describe_failure([ended(0, 3, 1.0)], error_files={}, logs={0: (log,)})
    assert len(failure.root.tail) == 8
    assert failure.root.tail[-1] == "last"
    assert "          last\n" in report(failure)


def test_many_failures_are_summed_up() -> None:
    exits = [ended(rank, 1, 1.0 + rank) for rank in range(64)]
    text = report(describe_failure(exits, error_files={}, logs={}))
    assert "60 more failed after it" in text
    assert len(text.splitlines()) <= 5


def test_a_round_without_a_failure_has_no_description() -> None:
    with pytest.raises(ValueError, match="no worker failed"):
        describe_failure([ended(0, 0, 1.0)], error_files={}, logs={})


@pytest.mark.parametrize(
    ("exit_code", "words", "status"),
    [
        (1, "exited with status 1", 1),
        (255, "exited with status 255", 255),
        (-15, "killed by SIGTERM (signal 15)", 143),
        (-250, "killed by a signal without a name (signal 250)", 378),
    ],
)
def test_exit_codes_in_words_and_for_a_shell(exit_code: int, words: str, status: int) -> None:
    assert describe_exit(exit_code) == words
    assert exit_status(exit_code) == status
