"""torchtitan on this device: the shims, and the command line.

torchtitan takes its device for good when it is imported, so what needs it runs in one process of
its own (`titan_findings.py`), whose findings the tests look at.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tpu_dist.recipes.errors import RecipeError
from tpu_dist.recipes.titan import compatibility

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="needs torchtitan: the recipes extra"
)

SECONDS = 200


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("titan_findings.py"))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    findings: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return findings


def test_torchtitan_is_imported_without_triton_and_torch_is_not_fooled(
    found: dict[str, Any],
) -> None:
    assert found["torch sees triton"] == (find_spec("triton") is not None)
    assert found["finder left"] is False


def test_a_second_device_in_one_process_is_refused(found: dict[str, Any]) -> None:
    assert found["second device"].startswith("RecipeError: device 'cpu' was asked for")
    assert "'tpu'" in found["second device"]


def test_another_series_of_torchtitan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchtitan", raising=False)
    monkeypatch.setattr(compatibility.metadata, "version", lambda package: "0.3.0")
    with pytest.raises(RecipeError, match="torchtitan 0.3.0 is installed"):
        compatibility.prepare()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="one of tpu, cpu, got abacus"):
        compatibility.prepare("abacus")


@pytest.mark.parametrize("device", ["tpu", "cpu"])
def test_tokens_go_to_experts_as_torchtitans_reference_sends_them(
    device: str, found: dict[str, Any]
) -> None:
    """Against torchtitan's own loop, over ranks, experts, empty groups and alignments."""
    assert found["routing"][device] == {"cases": 20, "different": []}


def test_mfu_knows_every_generation_and_makes_up_none(found: dict[str, Any]) -> None:
    # Of a device: half a chip of v2, v3 and v7x.
    assert found["peak teraflops"] == {
        "TPU v2": 23.0,
        "TPU v3": 61.5,
        "TPU v4": 275.0,
        "TPU v5e": 197.0,
        "TPU v5p": 459.0,
        "TPU v6e": 918.0,
        "TPU v7x": 1153.5,
        "NVIDIA H100": 989.0,
        "CPU (TPU stand-in)": "nan",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no --config was given; tpu_dist.recipes.titan.configs has llama3_debug"),
        ("--config lama", "--config lama; tpu_dist.recipes.titan.configs has llama3_debug"),
        ("--config llama3_debug --topology v99:2x2", "v99"),
        ("--config llama3_debug --training.stepz 3", "--training.stepz"),
        ("--config llama3_debug --job.config_file x.toml", "--job.config_file is not read here"),
        ("--device abacus", "invalid choice: 'abacus'"),
        ("--module no.such.module --config x", "no.such.module"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: str, message: str, found: dict[str, Any]
) -> None:
    status, printed = found["command line"][arguments]
    assert status == 2
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As published with the weights. Of the mixtures, DeepSeek counts the routers' biases, which
        # are buffers here: 256 for each of 58 layers.
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("qwen3_32b", 32_762_123_264),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_235b_a22b", 235_093_634_560),
        ("deepseek_v3_671b", 671_026_419_200),
    ],
)
def test_large_models_are_the_published_ones_and_fit_their_pods(
    name: str, parameters: int, found: dict[str, Any]
) -> None:
    model = found["large"][name]
    biases = model["biases"] if name.startswith("deepseek") else 0
    assert model["parameters"] + biases == parameters
    assert model["attention"] == "sdpa"
    assert model["grouped"] is not False or name == "qwen3_32b"
