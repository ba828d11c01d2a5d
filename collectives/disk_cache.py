"""A cache on disk of values that take long to come by: one JSON file for each key.

Several processes may use one directory at once: an entry is written aside and renamed into place,
so that a reader finds a whole one or none. An entry that cannot be read, or holds something else
than its name says, counts as missing and is written anew; it is said in `notes`, as is a directory
that cannot be written. What was used least lately goes when the entries outgrow their bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20  # some ten thousand rows of a plan, at a block of the disk each
_KEEP = 0.75  # of the bound, once it is passed
_ABANDONED_SECONDS = 3600.0  # after which a file that was never renamed has lost its writer
_BLOCK = 512  # bytes of st_blocks


class DiskCache:
    """JSON values by JSON keys.

    Attributes:
        notes: what went wrong, for people; nothing of it keeps a caller from its work.

    Example:
        >>> cache = DiskCache(Path("/tmp/doctest-cache"))
        >>> cache.put({"verb": "all_gather"}, {"seconds": 1.5})
        >>> cache.get({"verb": "all_gather"})
        {'seconds': 1.5}
    """

    def __init__(self, directory: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Name the directory; it is made when something is put.

        Args:
            directory: for nothing else.
            max_bytes: that its files may take of the disk.
        """
        self.notes: list[str] = []
        self._directory = directory
        self._max_bytes = max_bytes
        self._used: int | None = None  # bytes, counted at the first put

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """Return the value of a key, or None."""
        path = self._path(key)
        try:
            entry = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note(f"{path} cannot be read and is ignored: {error}")
            return None
        sound = isinstance(entry, dict) and _digest(entry.get("key")) == _digest(dict(key))
        if not sound or entry.get("sha256") != _digest(entry.get("value")):
            self._note(f"{path} is damaged and is ignored")
            return None
        with contextlib.suppress(OSError):  # the time of last use, where it may be set
            os.utime(path)
        return entry["value"]

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Keep a value, in place of the one before."""
        path = self._path(key)
        text = json.dumps({"key": dict(key), "value": value, "sha256": _digest(value)}, indent=1)
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                written = os.stat(name).st_blocks * _BLOCK
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
            self._make_room(written)
        except OSError as error:
            self._note(f"results cannot be kept in {self._directory}: {error}")

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self._directory / f"{_digest(dict(key))}.json"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _make_room(self, written: int) -> None:
        """Count what was written; drop the entries used least lately if it is too much."""
        if self._used is not None:
            self._used += written
            if self._used <= self._max_bytes:
                return
        found = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                status = path.stat()
                if path.suffix != ".json" and status.st_mtime > time.time() - _ABANDONED_SECONDS:
                    continue
                found.append((status.st_mtime, status.st_blocks * _BLOCK, path))
        self._used = sum(size for _, size, _ in found)
        if self._used <= self._max_bytes:
            return
        for _, size, path in sorted(found):
            if self._used <= self._max_bytes * _KEEP:
                return
            path.unlink(missing_ok=True)
            self._used -= size


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
