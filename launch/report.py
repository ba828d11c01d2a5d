"""The report of a failed run: short, the root cause first, and what to do about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from rich.text import Text

from tpu_dist.launch.console import NAME
from tpu_dist.launch.failure import RoundFailure, WorkerFailure, describe_exit
from tpu_dist.launch.processes import WorkerExit

_MAX_MESSAGE_LINES = 8
_MAX_OTHERS = 3

_NATIVE = "a crash below Python. PYTHONFAULTHANDLER=1 makes the worker print where it was"
_ADVICE: Mapping[int, str] = {
    signal.SIGKILL: "somebody sent SIGKILL, most often the kernel as memory ran out: see `dmesg`, "
    "or the container's memory limit",
    signal.SIGTERM: "somebody else than the launcher ended it: see the scheduler's events",
    signal.SIGSEGV: _NATIVE,
    signal.SIGBUS: f"{_NATIVE}. A full /dev/shm is a common cause",
    signal.SIGABRT: f"{_NATIVE}. A failed check of a library prints its reason above",
    signal.SIGILL: _NATIVE,
    signal.SIGFPE: _NATIVE,
}


def failure_report(
    failure: RoundFailure, *, host: str, restarts: int, elsewhere: bool = False
) -> Text:
    """Return the report of a run that ended by ``failure``.

    Args:
        failure: the last round's.
        host: the host the root worker ran on.
        restarts: how often the workers had been started anew before.
        elsewhere: whether that is another host, whose files cannot be named.
    """
    root, end = failure.root, failure.root.end
    text = Text()
    text.append(f"{NAME}: ", "bold")
    text.append(f"rank {end.rank} {describe_exit(end.exit_code)}\n", "bold red")
    _row(
        text,
        "worker",
        f"rank {end.rank} (local rank {end.local_rank}), pid {end.pid}, host {host}, "
        f"{_seconds(end)} after its start{_after_restarts(restarts)}",
    )
    if root.message:
        _row(text, "error", "\n".join(root.message.strip().splitlines()[:_MAX_MESSAGE_LINES]))
    elif root.tail:
        _row(text, "stderr", "\n".join(root.tail))
    for log in root.logs:
        _row(text, "log", str(log))
    if root.error_file and root.logs:
        _row(text, "details", str(root.error_file))
    _row(text, "others", _others(failure))
    _row(text, "to do", f"see its output on host {host}" if elsewhere else _advice(root))
    text.rstrip()
    return text


def with_traceback(text: Text, traceback: str | None) -> Text:
    """Return a report with the traceback, where there is one, as its last lines."""
    if traceback:
        text.append(f"\n{traceback.rstrip()}")
    return text


def lost_host_report(host: str, why: str, *, restarts: int) -> Text:
    """Return the report of a run that ended as a host was lost."""
    text = Text()
    text.append(f"{NAME}: ", "bold")
    text.append(f"host {host} is lost{_after_restarts(restarts)}\n", "bold red")
    _row(text, "why", why)
    _row(text, "to do", "look at that host's own output; --max-restarts N survives N such losses")
    text.rstrip()
    return text


def restart_message(failure: RoundFailure, *, restart: int, max_restarts: int) -> str:
    """Return the one line that says why all workers are started anew."""
    end = failure.root.end
    cause = f": {failure.root.message.strip().splitlines()[0]}" if failure.root.message else ""
    return (
        f"rank {end.rank} (pid {end.pid}) {describe_exit(end.exit_code)} after {_seconds(end)}"
        f"{cause}; starting all workers anew (restart {restart} of {max_restarts})"
    )


def _row(text: Text, label: str, value: str) -> None:
    if value:
        first, *rest = value.splitlines()
        text.append(f"  {label:<8}", "dim")
        text.append(f"{first}\n")
        for line in rest:
            text.append(f"  {'':<8}{line}\n")


def _seconds(end: WorkerExit) -> str:
    return f"{end.ran_for.total_seconds():.1f} s"


def _after_restarts(restarts: int) -> str:
    return "" if not restarts else f", after {restarts} restart{'s' if restarts > 1 else ''}"


def _others(failure: RoundFailure) -> str:
    parts = [
        f"rank {end.rank} {describe_exit(end.exit_code)} "
        f"{max(0.0, end.at - failure.root.end.at):.1f} s later"
        for end in failure.others[:_MAX_OTHERS]
    ]
    if len(failure.others) > _MAX_OTHERS:
        parts.append(f"{len(failure.others) - _MAX_OTHERS} more failed after it")
    if failure.num_ended:
        were = "other worker was" if failure.num_ended == 1 else "other workers were"
        parts.append(f"{failure.num_ended} {were} ended by the launcher")
    return "; ".join(parts)


def _advice(root: WorkerFailure) -> str:
    exit_code = root.end.exit_code
    if exit_code < 0:
        return _ADVICE.get(-exit_code, "")
    if root.message or root.tail:
        return ""
    if root.logs:
        return "see the log"
    return (
        "see its output above. To have its last words here: --tee 3, or "
        "torch.distributed.elastic.multiprocessing.errors.record as its main function's decorator"
    )
