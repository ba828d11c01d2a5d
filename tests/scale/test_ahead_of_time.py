"""A few programs of large pods, compiled here by libtpu's compiler: the forms keep their promise.

Skipped where libtpu is not installed (pip install 'tpu-dist[tpu]').
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tpu_dist.launch.cli import main
from tpu_dist.launch.planner_process import PlannerProcess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed"
)

MIB = 1 << 20
COLUMNS = {
    "axis",
    "verb",
    "form",
    "bytes",
    "algorithm",
    "links_used",
    "modelled_us",
    "ideal_us",
    "efficiency",
    "temp_bytes",
    "compile_s",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_DIST_CACHE_DIR", str(tmp_path / "cache"))


def efficiencies(topology: str, mesh: dict[str, int], verbs: dict[str, float]) -> None:
    """Compile the tuned form of each verb over each axis, and hold it to its least efficiency."""
    with PlannerProcess(topology, mesh) as planner:
        for axis, name in enumerate(mesh):
            for verb, least in verbs.items():
                case = {"axis": axis, "verb": verb, "form": "tuned", "bytes": 64 * MIB}
                row = planner.row(case)
                assert "failed" not in row, row
                assert least <= row["efficiency"] <= 1, (name, row)


def test_a_pod_of_9216_chips() -> None:
    verbs = {"all_gather": 0.95, "reduce_scatter": 0.66}
    efficiencies("tpu7x:16x24x24", {"all": 18432}, verbs)


@pytest.mark.parametrize("topology", ["v5e:8x8", "v6e:4x4", "v5p:2x2x2", "tpu7x:4x4x4"])
def test_whole_slices(topology: str) -> None:
    devices = {"v5e:8x8": 64, "v6e:4x4": 16, "v5p:2x2x2": 8, "tpu7x:4x4x4": 128}[topology]
    verbs = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0.95)
    efficiencies(topology, {"all": devices}, verbs)


def test_the_axes_of_a_mesh() -> None:
    verbs = dict.fromkeys(("all_gather", "reduce_scatter"), 0.95)
    efficiencies("tpu7x:4x4x4", {"dp": 16, "tp": 8}, verbs)


def test_the_command_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["plan", "--topology", "v5e:2x2", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert (written["topology"], written["devices"]) == ("v5e:2x2", 4)
    assert len(written["rows"]) == 6
    for row in written["rows"]:
        assert set(row) == COLUMNS
        assert row["axis"] == "all"
    assert "6 programs in" in capsys.readouterr().out


def test_a_second_plan_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*options: str) -> tuple[object, str]:
        path = tmp_path / "rows.json"
        command = ["plan", "--topology", "v5e:2x2", "--mesh", "a=2,b=2", "--json", str(path)]
        assert main([*command, *options]) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    first, _ = rows()
    second, said = rows()
    assert second == first  # with the times of the compiles that were made
    assert "12 of them known from earlier" in said
    (anew, said) = rows("--no-cache")
    assert "known from earlier" not in said
    assert anew != first  # in these times
