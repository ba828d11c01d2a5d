"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Make ``path`` hold ``content``: whole and durable when this returns, or as it was before.

    One process at a time may write a given path.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: what was renamed into it stays after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
