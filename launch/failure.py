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
        message: its exception, from the error file that torchelastic's ``record`` writes.
        tail: the last lines of its stderr, where that went to a file.
        error_file: the error file, if it wrote one.
        logs: the files its streams went to.
    """

    end: WorkerExit
    message: str | None = None
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
    return RoundFailure(
        root=WorkerFailure(
            end=root,
            message=_read_message(error_file) if error_file else None,
            tail=_read_tail(files),
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


def _read_message(error_file: Path) -> str | None:
    """Return the exception's text; None without a file or where it was not finished."""
    try:
        content: Any = json.loads(error_file.read_text(encoding="utf-8", errors="replace"))
        message = content["message"]
        return str(message if isinstance(message, str) else message["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_tail(files: Sequence[Path]) -> tuple[str, ...]:
    for file in files:
        if file.name != "stderr.log":
            continue
        try:
            with file.open("rb") as log:
                log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(line for line in lines if line.strip())[-_TAIL_LINES:]
    return ()
