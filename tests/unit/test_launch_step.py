"""What a training step moves: sizes of a model's units, and what a mesh makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpu_dist.launch.cli import main
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.mesh_option import parse_mesh
from tpu_dist.launch.plan_report import show_step
from tpu_dist.launch.step import StepOption, Transfer, plan_step, read_sizes, transfers_of
from tpu_dist.topology.system import System

MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.inner = nn.Sequential()
        self.inner.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight  # counts once

def build():
    print("what a user's code prints is not in the way")
    return Model()

def broken():
    raise ValueError("no such size")

def number():
    return 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path}/model.py"


def test_each_block_is_a_unit_and_the_rest_is_the_root_s(model: str) -> None:
    assert read_sizes(f"{model}:build") == (72, 72, 72, 800)


def test_a_recipe_s_model_is_read_by_name() -> None:
    *blocks, root = read_sizes("kjv")
    assert len(blocks) == 4 and len(set(blocks)) == 1
    assert root > 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("other", "no recipe is called 'other'; there are kjv"),
        ("{}:missing", "has no function 'missing'"),
        ("{}:broken", "ValueError: no such size"),
        ("{}:number", "returned a int, and not an nn.Module"),
        ("nowhere.py:build", "'nowhere.py' cannot be imported"),
        ("no_such_module:build", "No module named 'no_such_module'"),
    ],
)
def test_what_has_no_sizes_is_refused(model: str, what: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        read_sizes(what.format(model))


def test_gathers_twice_scatters_once_and_reduces_shards_where_they_are_replicated() -> None:
    mesh = parse_mesh("dp=2,fsdp=4,tp=2")
    assert transfers_of(mesh, (800, 800, 1600)) == (
        Transfer(axis=1, verb="all_gather", bytes=800, times=4),
        Transfer(axis=1, verb="reduce_scatter", bytes=800, times=2),
        Transfer(axis=0, verb="all_reduce", bytes=200, times=2),
        Transfer(axis=1, verb="all_gather", bytes=1600, times=2),
        Transfer(axis=1, verb="reduce_scatter", bytes=1600, times=1),
        Transfer(axis=0, verb="all_reduce", bytes=400, times=1),
    )
    assert transfers_of(parse_mesh("fsdp=1"), (8,)) == ()


@pytest.mark.parametrize(
    ("mesh", "said"),
    [("dp=2,ep=2", "the axis 'ep' .* not known"), ("dp=2,tp=2", "one axis that shards")],
)
def test_axes_must_be_known_and_one_must_shard(mesh: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        transfers_of(parse_mesh(mesh), (8,))


def planned(failing: str = "") -> dict[str, Any]:
    def row(case: Any) -> dict[str, Any]:
        if case["verb"] == failing:
            return {"failed": "no"}
        return {"modelled_us": 10.0 if case["form"] == "naive" else 5.0}

    system = System.parse("v5e:2x2")
    option = StepOption(model="m", tokens=1000, mfu=0.5)
    return plan_step(system, parse_mesh("fsdp=4"), option, (197_000_000,), row)


def test_the_share_is_of_the_step_that_the_mfu_makes() -> None:
    step = planned()
    assert step["step_us"] == pytest.approx(6 * 197e6 * 1000 / (0.5 * 197e12) * 1e6)
    assert (step["naive_us"], step["tuned_us"]) == (30.0, 15.0)  # two gathers and a scatter
    assert step["tuned_share"] == pytest.approx(15 / step["step_us"], abs=1e-4)


def test_a_step_is_shown_also_where_a_program_failed(capsys: pytest.CaptureFixture[str]) -> None:
    show_step(planned())
    assert "0.1%" in capsys.readouterr().out
    show_step(planned("all_gather"))
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--recipe", "kjv", "--model", "a:b"], "exclude each other"),
        (["--mfu", "0.5"], "--mfu is of a step"),
        (["--recipe", "kjv", "--mfu", "40"], "--mfu 40: expected a part of 1"),
        (["--recipe", "kjv", "--tokens", "0"], "--tokens 0: expected at least 1"),
        (["--recipe", "kjv", "--tokens", "many"], "invalid literal"),
        (["--recipe", "other"], "no recipe is called 'other'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["plan", "--topology", "v5e:2x2", *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
