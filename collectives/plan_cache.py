"""The results of `planner` kept on disk, by everything that they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tpu_dist.collectives.disk_cache import DiskCache

_COMPILERS = ("libtpu", "jax", "jaxlib")
_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")  # that change what the compiler does
_OWN_PARTS = ("tpu_dist.collectives", "tpu_dist.topology")


class PlanCache:
    """Values by what was asked, for the compiler, the flags and the code of this process.

    What was asked names topology, mesh, axis, verb, form, dtype and bytes; forms, layouts and the
    compiler's options follow from it by our own code, whose text is a part of the key.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        """Take up the cache in a directory.

        Args:
            directory: of all caches; plans have one of their own in it.
            environ: the compiler's flags are read from it.
        """
        self._disk = DiskCache(directory / "plans")
        self._common = {
            **{name: _version(name) for name in _COMPILERS},
            **{name: environ.get(name, "") for name in _FLAGS},
            "code": code_digest(),
        }

    def get(self, asked: Mapping[str, Any]) -> Any | None:
        """Return what is known of it, or None."""
        return self._disk.get({**self._common, **asked})

    def put(self, asked: Mapping[str, Any], value: Any) -> None:
        """Keep what was found out."""
        self._disk.put({**self._common, **asked}, value)

    def take_notes(self) -> list[str]:
        """Return what went wrong since the last time."""
        notes, self._disk.notes = self._disk.notes, []
        return notes


@cache
def code_digest() -> str:
    """Return a digest of our own code that plans come from."""
    digest = hashlib.sha256()
    for part in _OWN_PARTS:
        (folder,) = import_module(part).__path__
        for path in sorted(Path(folder).glob("*.py")):
            digest.update(f"{part}/{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
