"""The cache on disk: what it keeps, what it ignores, and several processes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_dist.collectives.disk_cache import DiskCache
from tpu_dist.collectives.plan_cache import PlanCache
from tpu_dist.runtime.environment import cache_directory

KEY = {"verb": "all_gather", "mesh": (4, 8), "bytes": 1 << 20}
VALUE = {"seconds": 1.5, "links": [1, 2]}


def entry(directory: Path) -> Path:
    (path,) = directory.glob("*.json")
    return path


def test_a_value_is_found_again_by_its_key_and_no_other(tmp_path: Path) -> None:
    DiskCache(tmp_path / "new").put(KEY, VALUE)
    cache = DiskCache(tmp_path / "new")
    assert cache.get(KEY) == VALUE
    assert cache.get({**KEY, "bytes": 2}) is None
    assert cache.get({"verb": "all_gather"}) is None
    assert not cache.notes
    assert not list((tmp_path / "new").glob("*.tmp"))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"key": ',
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"key": {}, "value": 1, "sha256": ""}',
    ],
)
def test_a_damaged_entry_is_said_ignored_and_written_anew(tmp_path: Path, damage: bytes) -> None:
    DiskCache(tmp_path).put(KEY, VALUE)
    entry(tmp_path).write_bytes(damage)
    cache = DiskCache(tmp_path)
    assert cache.get(KEY) is None
    assert len(cache.notes) == 1 and "ignored" in cache.notes[0]
    cache.put(KEY, VALUE)
    assert DiskCache(tmp_path).get(KEY) == VALUE


def test_a_value_that_was_changed_is_damaged(tmp_path: Path) -> None:
    DiskCache(tmp_path).put(KEY, VALUE)
    path = entry(tmp_path)
    path.write_text(path.read_text().replace("1.5", "2.5"))
    assert DiskCache(tmp_path).get(KEY) is None


def test_an_entry_of_another_key_under_this_name_is_not_taken(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put(KEY, VALUE)
    path = entry(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("all_gather", "all_reduce"))
    assert cache.get(KEY) is None


def test_a_place_that_cannot_be_written_is_said_once_and_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "below")
    for _ in range(3):
        cache.put(KEY, VALUE)
    assert len(cache.notes) == 1 and "cannot be kept" in cache.notes[0]
    assert cache.get(KEY) is None


def test_what_was_used_least_lately_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=40 << 10)  # ten blocks of the usual 4 KiB
    for number in range(9):
        cache.put({"number": number}, number)
        path = next(p for p in tmp_path.glob("*.json") if p.stat().st_mtime > 1e9)
        os.utime(path, (number, number))
    assert cache.get({"number": 0}) == 0  # used now
    for number in range(100, 104):
        cache.put({"number": number}, number)
    assert sum(p.stat().st_blocks * 512 for p in tmp_path.iterdir()) <= 40 << 10
    kept = DiskCache(tmp_path)
    assert kept.get({"number": 0}) == 0
    assert kept.get({"number": 103}) == 103
    assert kept.get({"number": 1}) is None


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    left, fresh = tmp_path / "old.tmp", tmp_path / "new.tmp"
    for path in (left, fresh):
        path.write_text("x" * 9000)
    os.utime(left, (0, 0))
    DiskCache(tmp_path, max_bytes=4096).put(KEY, VALUE)
    assert not left.exists() and fresh.exists()


WRITER = """
import sys
from pathlib import Path
from tpu_dist.collectives.disk_cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), max_bytes=64 << 10)
for turn in range(200):
    key = {"number": turn % 20}
    found = cache.get(key)
    assert found in (None, [turn % 20] * 1000), found
    cache.put(key, [turn % 20] * 1000)
assert not cache.notes, cache.notes
"""


def test_several_processes_use_one_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    writers = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors


def test_versions_flags_and_question_are_all_in_the_key(tmp_path: Path) -> None:
    asked = {"topology": "v6e:4x4", "bytes": 1}
    PlanCache(tmp_path, {}).put(asked, 1)
    assert PlanCache(tmp_path, {}).get(asked) == 1
    assert PlanCache(tmp_path, {"LIBTPU_INIT_ARGS": "--x"}).get(asked) is None
    assert PlanCache(tmp_path, {"XLA_FLAGS": "--x"}).get(asked) is None
    assert PlanCache(tmp_path, {}).get({**asked, "bytes": 2}) is None
    key = json.loads(entry(tmp_path / "plans").read_text())["key"]
    assert {"libtpu", "jax", "jaxlib", "code", "topology", "bytes"} <= set(key)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"TPU_DIST_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/tpu_dist"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/tpu_dist"),
        ({"HOME": "/h"}, "/h/.cache/tpu_dist"),
    ],
)
def test_where_it_is(environ: dict[str, str], place: str) -> None:
    assert cache_directory(environ) == Path(place)
