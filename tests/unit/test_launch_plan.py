"""tpu-launch plan without the compiler: options, the planner's process, and how it is reported."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tpu_dist.launch import planner_process
from tpu_dist.launch.cli import main
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.plan import parse_bytes
from tpu_dist.launch.plan_report import plot_rows, show_rows
from tpu_dist.launch.planner_process import PlannerProcess
from tpu_dist.topology.system import System

ROW = {
    "axis": "tp",
    "verb": "all_gather",
    "form": "tuned",
    "bytes": 64 << 20,
    "algorithm": "all-gather (sparsecore Z_TORUS, 2 colours)",
    "links_used": 2.0,
    "modelled_us": 251.7,
    "ideal_us": 251.7,
    "efficiency": 1.0,
    "temp_bytes": 64 << 20,
    "compile_s": 0.4,
}

# Speaks as the planner does, and does as the case says.
OTHER_PLANNER = """
import json, os, sys, time
plan = json.loads(sys.stdin.readline())
print(json.dumps({"axes": list(plan["mesh"])}), flush=True)
for line in sys.stdin:
    verb = json.loads(line)["verb"]
    if verb == "die":
        sys.stderr.write("SIGFPE in the compiler")
        sys.stderr.flush()
        os.kill(os.getpid(), 8)
    if verb == "hang":
        time.sleep(60)
    row = {"verb": verb, "pid": os.getpid()}
    answer = {"row": row, "known": verb == "known", "notes": ["a.json is damaged"]}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Missing option '--topology'"),
        (["--topology", "v6e:3x3"], "there is no v6e:3x3"),
        (["--topology", "v6e:2x2", "--mesh", "a=3"], "a mesh of .3,. has 3 places"),
        (["--topology", "v6e:2x2", "--payload", "64"], "--payload '64': expected a size"),
        (["--topology", "v6e:2x2", "--payload", "65GiB"], "at most 64GiB"),
        (["--topology", "v6e:2x2", "--plot", "a.pdf"], "expected the name of a .png file"),
        (["--topology", "v3:4x4*2"], "v3 slices are not joined over DCN"),
        (["--topology", "v4:4x4x8_twisted"], "the model of links knows no twisted torus"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["plan", *options]) == 2
    error = " ".join(capsys.readouterr().err.split())
    with pytest.raises(LaunchError, match=said):
        raise LaunchError(error)


@pytest.mark.parametrize(
    ("text", "size"), [("1B", 1), ("64MiB", 64 << 20), (" 2 GiB ", 2 << 30), ("8KiB", 8192)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0MiB", "-1MiB", "1MB", "1.5MiB", "MiB", "9" * 12 + "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="expected a size"):
        parse_bytes(text)


@pytest.fixture
def other_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_planner.py").write_text(OTHER_PLANNER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.setattr(planner_process, "_MODULE", "other_planner")


@pytest.mark.usefixtures("other_planner")
def test_a_case_that_ends_the_compiler_fails_alone() -> None:
    with PlannerProcess("v6e:2x2", {"all": 4}) as planner:
        assert planner.axes == ("all",)
        first = planner.row({"verb": "all_reduce"})
        dead = planner.row({"verb": "die"})
        after = planner.row({"verb": "all_gather"})
    assert "ended with signal 8: SIGFPE in the compiler" in dead["failed"]
    assert after["verb"] == "all_gather" and after["pid"] != first["pid"]


@pytest.mark.usefixtures("other_planner")
def test_a_compile_has_a_deadline() -> None:
    with PlannerProcess("v6e:2x2", {"all": 4}, deadline=timedelta(seconds=3)) as planner:
        slow = planner.row({"verb": "hang"})
        after = planner.row({"verb": "all_gather"})
    assert slow["failed"] == "no answer within 0:00:03"
    assert after["verb"] == "all_gather"


@pytest.mark.usefixtures("other_planner")
def test_what_the_cache_knew_is_counted_and_its_notes_are_kept_once() -> None:
    with PlannerProcess("v6e:2x2", {"all": 4}) as planner:
        rows = [planner.row({"verb": verb}) for verb in ("known", "other", "known")]
    assert [row["verb"] for row in rows] == ["known", "other", "known"]
    assert planner.num_known == 2
    assert planner.notes == ["a.json is damaged"]


def test_rows_are_shown_and_failures_named(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"axis": "dp", "verb": "all_reduce", "form": "naive", "bytes": 1 << 20, "failed": "no"}
    show_rows(System.parse("tpu7x:4x4x4"), ("tp=8: a ring",), [ROW, failed])
    text = capsys.readouterr().out
    assert "mesh: tp=8: a ring" in text
    assert "252 us" in text and "1.000" in text and "64 MiB" in text
    assert "failed: dp all_reduce naive 1 MiB: no" in text


def test_efficiencies_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    plot_rows(path, "tpu7x:4x4x4", [ROW, {**ROW, "form": "naive", "efficiency": 0.5}])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(LaunchError, match="No such file or directory"):
        plot_rows(tmp_path / "no" / "plan.png", "", [ROW])
