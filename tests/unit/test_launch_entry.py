"""What is found out about a script, module or command before any worker starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tpu_dist.launch.entry import Entry, EntryKind, check_entry
from tpu_dist.launch.errors import LaunchError


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package that must not be imported by a look at it."""
    monkeypatch.chdir(tmp_path)
    for name in ("lp/sub/train.py", "lp/__init__.py", "lp/sub/__init__.py", "lp2/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported by the launcher')")
    (tmp_path / "ln/deep").mkdir(parents=True)
    (tmp_path / "ln/deep/train.py").touch()
    (tmp_path / "plain").mkdir()
    (tmp_path / "train.py").touch()
    return tmp_path


def check(kind: EntryKind, target: str) -> None:
    before = set(sys.modules)
    try:
        check_entry(Entry(kind=kind, target=target))
    finally:
        assert not [name for name in set(sys.modules) - before if name.startswith(("lp", "ln"))]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (EntryKind.SCRIPT, "train.py"),
        (EntryKind.SCRIPT, "lp2"),  # a directory with a __main__.py is a script for python
        (EntryKind.RUN_PATH, "train.py"),
        (EntryKind.MODULE, "lp.sub.train"),
        (EntryKind.MODULE, "lp2"),
        (EntryKind.MODULE, "ln.deep.train"),  # namespace packages
        (EntryKind.MODULE, "this"),
        (EntryKind.MODULE, "json.tool"),
        (EntryKind.COMMAND, "sh"),
        (EntryKind.COMMAND, sys.executable),
    ],
)
def test_what_can_run_passes(kind: EntryKind, target: str) -> None:
    check(kind, target)


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (EntryKind.SCRIPT, "nope.py", "script 'nope.py': no such file in "),
        (EntryKind.SCRIPT, "/nope.py", "script '/nope.py': no such file$"),
        (EntryKind.SCRIPT, "lp2.__main__", "did you mean -m lp2.__main__"),
        (EntryKind.SCRIPT, "plain", "a directory, and without a __main__.py"),
        (EntryKind.RUN_PATH, "nope.py", "no such file"),
        (EntryKind.MODULE, "nope", "-m 'nope': no such module for "),
        (EntryKind.MODULE, "lp.nope", "no such module"),
        (EntryKind.MODULE, "lp.sub.train.more", "no such module"),
        (EntryKind.MODULE, "train.py", "a script is given without -m"),
        (EntryKind.MODULE, "./train.py", "a script is given without -m"),
        (EntryKind.MODULE, "", "no such module"),
        (EntryKind.MODULE, "lp", "a package, and without a __main__"),
        (EntryKind.COMMAND, "no-such-command", "no such command, here or on PATH"),
        (EntryKind.COMMAND, "./train.py", "not an executable file"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    kind: EntryKind, target: str, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        check(kind, target)


def test_a_script_that_may_not_be_read_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").chmod(0)
    if os.access("train.py", os.R_OK):  # root may read anything
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LaunchError, match="no permission to read it"):
        check(EntryKind.SCRIPT, "train.py")
