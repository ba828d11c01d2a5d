"""Why a round failed: which worker was the first, and what is known about its end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_dist.launch.processes import WorkerExit

_TAIL_LINES = 8
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """One worker that failed.

    Attributes:
        end: how it ended.
        at: when it failed, in seconds of the epoch: its end, or before, when it wrote its error.
        message: its exception, from the error file that torchelastic's ``record`` writes.
        traceback: from there, or the end of its stderr from the last traceback on.
        tail: the last lines of its stderr, where that went to a file.
        error_file: the error file, if it wrote one.
        logs: the files its streams went to.
    """

    end: WorkerExit
    at: float
    message: str | None = None
    traceback: str | None = None
    tail: tuple[str, ...] = ()
    error_file: Path | None = None
    logs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailure:
    """A failed round.

    Attributes:
        root: the worker that failed first.
        others: workers that failed by themselves after it, in order: mostly because of it.
        num_ended: workers that were well, and were ended by the launcher because of it.
    """

    root: WorkerFailure
    others: tuple[WorkerExit, ...] = ()
    num_ended: int = 0


def describe_failure(
    exits: Sequence[WorkerExit],
    *,
    error_files: Mapping[int, Path],
    logs: Mapping[int, tuple[Path, ...]],
) -> RoundFailure:
    """Describe a round in which a worker failed.

    The root is the worker that failed first. An error file's time counts before the end of its
    process: a worker that raised may still be tearing down when the peers it left alone have died.

    Args:
        exits: how all workers ended, in order.
        error_files: where each local rank would write its error.
        logs: the files of each local rank's streams.

    Raises:
        ValueError: no worker failed.
    """
    failed = [end for end in exits if end.exit_code != 0 and not end.asked]
    if not failed:
        raise ValueError("no worker failed")

    def failed_at(end: WorkerExit) -> float:
        try:
            return min(end.at, error_files[end.local_rank].stat().st_mtime)
        except (OSError, KeyError):
            return end.at

    root = min(failed, key=failed_at)
    error_file = error_files.get(root.local_rank)
    files = tuple(file for file in logs.get(root.local_rank, ()) if file != Path(os.devnull))
    message, traceback = _read_error(error_file) if error_file else (None, None)
    lines = _read_tail(files)
    return RoundFailure(
        root=WorkerFailure(
            end=root,
            at=failed_at(root),
            message=message,
            traceback=traceback or _traceback_of(lines),
            tail=tuple(line for line in lines if line.strip())[-_TAIL_LINES:],
            error_file=error_file if error_file and error_file.is_file() else None,
            logs=files,
        ),
        others=tuple(end for end in failed if end is not root),
        num_ended=sum(end.asked for end in exits),
    )


def describe_exit(exit_code: int) -> str:
    """Say an exit code in words: ``exited with status 3``, ``killed by SIGKILL (signal 9)``."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a signal without a name"
    return f"killed by {name} (signal {-exit_code})"


def exit_status(exit_code: int) -> int:
    """Return the status for a shell: the worker's own, or 128 + N where signal N ended it."""
    return exit_code if exit_code > 0 else 128 - exit_code


def _read_error(error_file: Path) -> tuple[str | None, str | None]:
    """Return the exception's text and traceback; None without a file or an unfinished one."""
    try:
        content: Any = json.loads(error_file.read_text(encoding="utf-8", errors="replace"))
        message = content["message"]
        if isinstance(message, str):
            return message, None
        extra = message.get("extraInfo") or {}
        return str(message["message"]), str(extra.get("py_callstack") or "").strip() or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None


def _read_tail(files: Sequence[Path]) -> list[str]:
    for file in files:
        if file.name != "stderr.log":
            continue
        try:
            with file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
    return []


def _traceback_of(lines: Sequence[str]) -> str | None:
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most rec")]
    return "\n".join(lines[starts[-1] :]) if starts else None
