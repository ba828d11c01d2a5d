"""The process that compiles for ``tpu-launch plan``: started anew where the compiler ends it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from tpu_dist.launch.errors import LaunchError

_MODULE = "tpu_dist.collectives.planner"  # another floor: it is run, and not imported
_DEADLINE = timedelta(minutes=15)  # for one case; the largest pods took seconds
_TAIL = 400  # characters of what the compiler said last


class PlannerProcess:
    """Owns the planner's process and the thread that reads its answers; use as a context.

    Attributes:
        axes: how each axis of the mesh is laid out, in words.
        num_known: rows that were answered from the cache.
        notes: what is wrong with the cache.
    """

    def __init__(
        self,
        topology: str,
        mesh: Mapping[str, int],
        *,
        cache: bool = True,
        deadline: timedelta = _DEADLINE,
    ) -> None:
        """Start the process.

        Args:
            topology: of one slice, as in ``tpu7x:4x4x4``.
            mesh: sizes by name, the outermost first.
            cache: whether results may come from the cache, and are kept there.
            deadline: for one answer.

        Raises:
            LaunchError: the slice cannot be planned for.
        """
        self._plan = {"topology": topology, "mesh": dict(mesh), "cache": cache}
        self.num_known = 0
        self.notes: list[str] = []
        self._deadline = deadline
        self._start()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="plan-answers", daemon=True)
        self._reader.start()
        first = self._ask(self._plan)
        if "axes" not in first:
            said = first.get("error") or first.get("failed")
            self.close()
            raise LaunchError(f"cannot plan for {self._plan['topology']}: {said}")
        self.axes: tuple[str, ...] = tuple(first["axes"])

    def row(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Compile one case and return its row, or ``{"failed": why}``. Blocking.

        A case that ends the compiler fails alone: the next finds another process.
        """
        if self._process.poll() is not None:
            self.close()
            self._start()
        answer = self._ask(case)
        if "row" not in answer:
            return {"failed": answer["failed"]}
        self.num_known += bool(answer.get("known"))
        row: dict[str, Any] = answer["row"]
        return row

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=self._deadline.total_seconds())
        except queue.Empty:
            self._process.kill()
            self._process.wait()
            return {"failed": f"no answer within {self._deadline}"}
        if not line:
            return {"failed": self._ending()}
        answer: dict[str, Any] = json.loads(line)
        self.notes += [note for note in answer.get("notes", ()) if note not in self.notes]
        return answer

    def _ending(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip()[-_TAIL:]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the compiler's process ended with {how}: {said or 'it said nothing'}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        answers = self._answers
        for line in self._process.stdout:
            answers.put(line)
        answers.put("")

    def close(self) -> None:
        """End the process and what belongs to it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
