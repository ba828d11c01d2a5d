"""The directory of one run: whose it is, what made it, and what it holds.

runs/kjv-0001/config.json          what the run was asked for; --resume must ask for the same
runs/kjv-0001/tokenizer-<key>.json
runs/kjv-0001/checkpoints/         see checkpoint.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_dist.recipes.checkpoint import whole_checkpoints
from tpu_dist.recipes.errors import RunDirectoryError
from tpu_dist.recipes.files import write_atomically

Setting = int | float | bool | str

_CONFIG_FILE = "config.json"
_CHECKPOINTS = "checkpoints"
_NUMBERED = re.compile(r"(.+)-(\d{4,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """A run's directory.

    Attributes:
        path: Where.
        resume_step: The newest whole checkpoint to resume from; None starts from the beginning.
    """

    path: Path
    resume_step: int | None

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / _CHECKPOINTS


def claim(path: Path, settings: Mapping[str, Setting], *, resume: bool) -> RunDirectory:
    """Take a directory for a run, making it where needed. One process alone may do so.

    Args:
        path: The directory; may exist, may hold a run only with ``resume``.
        settings: All that decides the run's result, by option name.
        resume: Continue the run in it if there is one. If there is none, or it has no whole
            checkpoint yet, start from the beginning: a supervisor can restart with the same
            command, however early the run failed.

    Raises:
        RunDirectoryError: It holds a run that is not to be resumed, or one that was asked for
            something else, or cannot be written.
    """
    config_file = path / _CONFIG_FILE
    checkpoints = path / _CHECKPOINTS
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        if config_file.exists():
            if not resume:
                raise RunDirectoryError(
                    f"{path} holds a run already, with checkpoints at steps "
                    f"{list(whole_checkpoints(checkpoints))}. Continue it with --resume, or "
                    f"choose another --run-dir."
                )
            _require_same(config_file, settings)
        elif whole_checkpoints(checkpoints):
            raise RunDirectoryError(
                f"{path} holds checkpoints but no {_CONFIG_FILE}, so what they were trained with "
                f"is unknown. Choose another --run-dir."
            )
        else:
            write_atomically(config_file, (json.dumps(settings, indent=2) + "\n").encode())
        require_writable(checkpoints)
    except OSError as error:
        raise _not_writable(path, error) from error
    steps = whole_checkpoints(checkpoints)
    return RunDirectory(path=path, resume_step=steps[-1] if steps else None)


def numbered_path(parent: Path, name: str, number: int) -> Path:
    """``parent/name-NNNN``."""
    return parent / f"{name}-{number:04d}"


def fresh_path(parent: Path, name: str) -> Path:
    """The numbered path after the newest there is."""
    return numbered_path(parent, name, _newest_number(parent, name) + 1)


def newest_path(parent: Path, name: str) -> Path:
    """The numbered path with the highest number there is; 1, not yet there, if there is none."""
    return numbered_path(parent, name, max(1, _newest_number(parent, name)))


def number_of(path: Path) -> int:
    """The number of a :func:`numbered_path`."""
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None
    return int(match[2])


def require_writable(directory: Path) -> None:
    """Make sure that this process can write in a directory, by doing it.

    Raises:
        RunDirectoryError: It cannot.
    """
    probe = directory / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise _not_writable(directory, error) from error


def _require_same(config_file: Path, asked: Mapping[str, Setting]) -> None:
    try:
        found = json.loads(config_file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, found {type(found).__name__}")
    except ValueError as error:
        raise RunDirectoryError(
            f"{config_file} is not what a run writes: {error}. Choose another --run-dir."
        ) from error
    names = sorted(
        name
        for name in found.keys() | asked.keys()
        if name not in found or name not in asked or found[name] != asked[name]
    )
    if names:
        differences = "; ".join(
            f"--{name.replace('_', '-')}: the run has {found.get(name, 'nothing')}, "
            f"you asked for {asked.get(name, 'nothing')}"
            for name in names
        )
        raise RunDirectoryError(
            f"{config_file.parent} holds a run with other settings: {differences}. Resume with "
            f"the run's settings, or choose another --run-dir."
        )


def _newest_number(parent: Path, name: str) -> int:
    if not parent.is_dir():
        return 0
    matches = (_NUMBERED.fullmatch(path.name) for path in parent.iterdir())
    return max((int(m[2]) for m in matches if m and m[1] == name), default=0)


def _not_writable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} cannot hold a run: {error.strerror or error} ({error.filename}). Permit writing "
        f"there, or choose another --run-dir."
    )
