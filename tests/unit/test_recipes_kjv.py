"""The command line, as far as it goes without other processes."""

import signal
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tpu_dist.recipes import kjv_run, text
from tpu_dist.recipes.kjv import app
from tpu_dist.recipes.kjv_config import KjvConfig
from tpu_dist.recipes.world import World

pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


def run(*arguments: str, rank: int | None = 0, size: int = 1) -> Result:
    launched = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    unset = {"RANK": None, "WORLD_SIZE": None}
    return CliRunner().invoke(app, arguments, env=unset if rank is None else launched)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-steps", "0"], "num_steps must be at least 1, got 0"),
        (["--log-every", "0"], "log_every must be at least 1, got 0"),
        (["--learning-rate", "-1"], "learning_rate must be positive, got -1"),
        (["--learning-rate", "nan"], "learning_rate must be positive, got nan"),
        (["--sequence-length", "1"], "sequence_length must be at least 2, got 1"),
        (["--global-batch-size", "0"], "global_batch_size must be at least 1, got 0"),
        (["--dim", "100", "--num-heads", "3"], "even multiple of num_heads"),
        (["--compute-dtype", "float8"], "one of float32, bfloat16, got float8"),
        (["--reduce-dtype", "int8"], "one of float32, bfloat16, got int8"),
        (["--vocabulary-size", "5"], "vocabulary_size must be 257 to 65536"),
        (["--held-out-every", "1"], "held_out_every must be at least 2, got 1"),
        (["--keep-last", "0"], "keep_last must be at least 1, got 0"),
        (["--save-every", "-3"], "save_every must not be negative, got -3"),
        (["--timeout", "0"], "timeout must be positive"),
        (["--seed", "-1"], "seed must not be negative, got -1"),
        (["--device", "abacus"], "device 'abacus' is not known to torch"),
        (["--backend", "gloo"], "add --device cpu"),
        (["--sample-tokens", "-1"], "sample_tokens must not be negative, got -1"),
        (["--temperature", "-0.5"], "temperature must not be negative, got -0.5"),
        (["--prompt", ""], "prompt must not be empty"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_option_is_refused() -> None:
    assert run("--learning-rte", "1").exit_code == 2


def test_a_batch_that_does_not_divide_among_the_processes_is_refused() -> None:
    result = run("--global-batch-size", "8", size=3)
    assert result.exit_code == 2
    assert "8 does not divide among 3 processes times 1" in result.stderr


def test_without_a_launcher_it_says_how_to_launch() -> None:
    result = run(rank=None)
    assert result.exit_code == 2
    assert "RANK and WORLD_SIZE is not set. Run `tpu-launch" in result.stderr


def test_a_run_directory_under_a_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the recipes extra")
    (tmp_path / "file").touch()
    result = run("--run-dir", str(tmp_path / "file" / "run"))
    assert result.exit_code == 2
    assert "cannot hold a run" in result.stderr


def test_missing_packages_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tokenizers", None)
        assert 'pip install "tpu-dist[recipes]"' in run().stderr
    monkeypatch.setattr(text, "_PACKAGE", "no-such-package-of-ours")
    monkeypatch.setattr(kjv_run, "require_tokenizers", lambda: None)
    assert 'pip install "tpu-dist[recipes]"' in run().stderr


def test_options_default_to_the_dataclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KjvConfig] = []
    monkeypatch.setattr(
        sys.modules["tpu_dist.recipes.kjv"], "run", lambda config, world: asked.append(config)
    )
    assert run().exit_code == 0
    assert asked == [KjvConfig()]


def test_every_setting_that_decides_the_result_is_an_option_or_fixed() -> None:
    shown = run("--help", rank=None).stdout
    fixed = {"rope_base"}
    for name in KjvConfig().settings().keys() - fixed:
        assert f"--{name.replace('_', '-')}"[:20] in shown


def test_the_world_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert World.from_environment() == World(rank=3, size=8)


def test_importing_the_entry_changes_no_signal_handler() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
