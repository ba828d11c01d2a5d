"""What each worker runs: a script, a module or a command, and whether it is there to be run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from tpu_dist.launch import script_runner
from tpu_dist.launch.errors import LaunchError


class EntryKind(Enum):
    """How the workers run their target; the names are those of the command line."""

    SCRIPT = "python SCRIPT"
    MODULE = "--module"
    COMMAND = "--no-python"
    RUN_PATH = "--run-path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What each worker runs.

    Attributes:
        kind: how ``target`` is run.
        target: a path, a module's name or a command.
        arguments: what follows it, passed on as it is.
    """

    kind: EntryKind
    target: str
    arguments: tuple[str, ...] = ()

    def command(self, python: str) -> tuple[str, ...]:
        """Return the worker's command line, run by the interpreter ``python`` unless a command."""
        prefixes: Mapping[EntryKind, tuple[str, ...]] = {
            EntryKind.SCRIPT: (python, "-u"),
            EntryKind.MODULE: (python, "-u", "-m"),
            EntryKind.COMMAND: (),
            EntryKind.RUN_PATH: (python, "-u", script_runner.__file__),
        }
        return (*prefixes[self.kind], self.target, *self.arguments)


def entry_kind(*, module: bool, no_python: bool, run_path: bool) -> EntryKind:
    """Return the kind that the flags ask for.

    Raises:
        LaunchError: more than one flag.
    """
    flags = {
        EntryKind.MODULE: module,
        EntryKind.COMMAND: no_python,
        EntryKind.RUN_PATH: run_path,
    }
    chosen = [kind for kind, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        names = " and ".join(kind.value for kind in chosen)
        raise LaunchError(f"{names} exclude each other: give one of them")
    return chosen[0] if chosen else EntryKind.SCRIPT


def check_entry(entry: Entry, *, own_python: bool = True) -> None:
    """Find out before any worker starts whether the target can be run at all.

    A module is looked up without importing it or its parents, as an import could take the TPU.

    Args:
        entry: what is to be run.
        own_python: whether the workers run under this interpreter; modules of another one cannot
            be looked up from here and pass.

    Raises:
        LaunchError: it does not exist, or cannot be read or run.
    """
    if entry.kind is EntryKind.COMMAND:
        _check_command(entry.target)
    elif entry.kind is EntryKind.MODULE:
        if own_python:
            _check_module(entry.target)
    else:
        _check_script(entry.target)


def _check_script(target: str) -> None:
    path = Path(target)
    if not path.exists():
        looked = "" if path.is_absolute() else f" in {Path.cwd()}"
        hint = ""
        if "/" not in target and not target.endswith(".py") and _is_runnable_module(target):
            hint = f"; there is a module of that name: did you mean -m {target}?"
        raise LaunchError(f"script {target!r}: no such file{looked}{hint}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(f"script {target!r}: a directory, and without a __main__.py to run")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"script {target!r}: no permission to read it")


def _check_command(target: str) -> None:
    if shutil.which(target) is None:
        found = Path(target).exists()
        why = "not an executable file" if found else "no such command, here or on PATH"
        raise LaunchError(f"{EntryKind.COMMAND.value} {target!r}: {why}")


def _check_module(target: str) -> None:
    if not _module_exists(target):
        hint = ""
        if target.endswith(".py") or "/" in target:
            hint = "; a script is given without -m"
        raise LaunchError(f"-m {target!r}: no such module for {sys.executable}{hint}")
    if not _is_runnable_module(target):
        raise LaunchError(f"-m {target!r}: a package, and without a __main__ module to run")


def _module_exists(name: str) -> bool:
    return _lookup(name) is not None


def _is_runnable_module(name: str) -> bool:
    spec = _lookup(name)
    if isinstance(spec, ModuleSpec) and spec.submodule_search_locations is not None:
        return _module_exists(f"{name}.__main__")  # a package
    return spec is not None


def _lookup(name: str) -> ModuleSpec | bool | None:
    """Return the module's spec, None if there is none, or True if only an import could tell."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        try:
            spec = _find(".".join(parts[:end]), path)
        except KeyError:  # a namespace package within another asks sys.modules for that
            return True
        if spec is None:
            return None
        if end < len(parts) and spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if not name.rpartition(".")[2]:
        return None
    if (
        path is None
    ):  # `python -m` looks in the working directory first, the launcher's path does not
        here = PathFinder.find_spec(name, [os.getcwd()])
        if here is not None:
            return here
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
