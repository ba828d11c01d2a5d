"""tpu-launch's command line: what is parsed, what is refused, and that it is cheap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tpu_dist
from tpu_dist.launch import cli
from tpu_dist.launch.cli import CommandLine, main, parse
from tpu_dist.launch.environment import SETTINGS
from tpu_dist.launch.errors import LaunchError


def parsed(*argv: str) -> CommandLine:
    command_line = parse(argv)
    assert isinstance(command_line, CommandLine)
    return command_line


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))))
def test_all_after_the_script_is_the_script_s(arguments: list[str]) -> None:
    command_line = parsed("--nproc-per-node", "2", "train.py", *arguments)
    assert command_line.target == "train.py"
    assert command_line.arguments == tuple(arguments)
    assert command_line.settings == {"nproc-per-node": "2"}


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc-per-node", "4", "--max-restarts", "3"],
        ["--nproc-per-node=4", "--max-restarts=3"],
        ["--nproc_per_node", "4", "--max_restarts=3"],
    ],
)
def test_options_may_be_written_as_for_torchrun(argv: list[str]) -> None:
    assert parsed(*argv, "t.py").settings == {"nproc-per-node": "4", "max-restarts": "3"}


def test_flags_and_short_options() -> None:
    command_line = parsed("-m", "-t", "3", "-r", "0:1", "--standalone", "pkg.train", "-m")
    assert command_line.settings == {
        "module": "True",
        "tee": "3",
        "redirects": "0:1",
        "standalone": "True",
    }
    assert (command_line.target, command_line.arguments) == ("pkg.train", ("-m",))


def test_a_double_dash_before_the_script_is_ours_and_after_it_not() -> None:
    command_line = parsed("--", "train.py", "--", "-x")
    assert (command_line.target, command_line.arguments) == ("train.py", ("--", "-x"))


def test_every_option_has_its_environment_variable() -> None:
    options = {
        option.removeprefix("--")
        for parameter in cli.typer.main.get_command(cli._app).params
        for option in parameter.opts
        if option.startswith("--")
    }
    assert options - {"version", "help"} == set(SETTINGS.values())
    for variable, name in SETTINGS.items():
        assert variable == "TPU_LAUNCH_" + name.upper().replace("-", "_")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["--nproc-per-node"], "'--nproc-per-node' requires an argument"),
        (["--nproc-per-nod", "2", "t.py"], "--nproc-per-node"),
        (["--frobnicate", "t.py"], "No such option: --frobnicate"),
        (["--start-method", "fork", "t.py"], "--start-method: each worker is a program"),
        (["--start_method=fork", "t.py"], "--start-method: each worker is a program"),
        (["--virtual-local-rank", "t.py"], "--virtual-local-rank: "),
    ],
)
def test_bad_command_lines_are_refused_by_name(argv: list[str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.py"], "script 'nowhere.py': no such file in"),
        (["--nnodes", "2", "t.py"], "2 hosts, and nothing says where they meet"),
        (["--nnodes=4:1", "t.py"], "--nnodes '4:1': expected a number of hosts, MIN:MAX, or auto"),
        (["--nnodes=2", "--standalone", "t.py"], "--standalone is one host alone"),
        (["--rdzv-endpoint", "host0:x", "t.py"], "--rdzv-endpoint 'host0:x': expected HOST:PORT"),
        (["--master-port", "29500", "t.py"], "--master-port '29500': it needs --master-addr"),
        (
            ["--nnodes=2", "--node-rank=2", "--master-addr=127.0.0.1", "t.py"],
            "ranks of 2 hosts go from 0 to 1. It counts hosts, not workers",
        ),
        (["--nnodes=2", "--master-addr=h", "--rdzv-endpoint=h", "t.py"], "leave one of them out"),
        (
            ["--nnodes=2", "--rdzv-endpoint=127.0.0.1", "--rdzv-conf=join=3", "t.py"],
            "--rdzv-conf 'join=3': expected NAME=SECONDS of join_timeout",
        ),
        (
            ["--nnodes=2", "--rdzv-endpoint=127.0.0.1", "--token-file=nowhere", "t.py"],
            "--token-file 'nowhere': cannot be read",
        ),
        (["--rdzv-backend=etcd", "t.py"], "--rdzv-backend 'etcd'"),
        (["--nproc-per-node=0", "t.py"], "--nproc-per-node '0': at least one"),
        (["--nproc-per-node=-2", "t.py"], "--nproc-per-node '-2': at least one"),
        (["--nproc-per-node=two", "t.py"], "expected a number of workers, or one of auto"),
        (["--nproc-per-node=1.5", "t.py"], "expected a number of workers, or one of auto"),
        (["--nproc-per-node=gpu", "t.py"], "use torchrun for others"),
        (["--max-restarts=-1", "t.py"], "--max-restarts '-1': expected a whole number"),
        (["--monitor-interval=0", "t.py"], "--monitor-interval '0': expected a number of seconds"),
        (["--monitor-interval=nan", "t.py"], "expected a number of seconds"),
        (["--tee=4", "t.py"], "--tee '4': expected 0 (none)"),
        (["--tee=1:3", "t.py"], "there is no local rank 1"),
        (["--local-ranks-filter=0,x", "t.py"], "expected local ranks"),
        (["--local-ranks-filter=5", "t.py"], "there is no local rank 5"),
        (["--rdzv-id=a/b", "t.py"], "cannot have a '/' in it"),
        (["--module", "--no-python", "t.py"], "--module and --no-python exclude each other"),
    ],
)
def test_wrong_runs_end_with_status_2_before_torch_is_imported(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    for variable in SETTINGS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "tpu_dist.launch.run", None)  # importing it would raise
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tpu-launch: error: ")
    assert message in captured.err


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_does_without_torch(flag: str) -> None:
    # tpu_dist itself is left out: whether importing it takes torch is not the launcher's to say.
    code = f"""
import sys, types
package = types.ModuleType("tpu_dist")
package.__path__ = {list(tpu_dist.__path__)}
sys.modules["tpu_dist"] = package
from tpu_dist.launch.cli import main
status = main([{flag!r}])
assert not {{"torch", "jax", "numpy"}} & set(sys.modules), "imported too much"
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "tpu-launch" in done.stdout
