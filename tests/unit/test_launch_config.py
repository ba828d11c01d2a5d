"""How settings become a LaunchConfig: order, defaults, and what is counted."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tpu_dist.launch.config import LaunchConfig, build_config
from tpu_dist.launch.entry import EntryKind
from tpu_dist.launch.environment import read_environment
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.settings import (
    Setting,
    Streams,
    parse_flag,
    parse_ranks,
    parse_streams,
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def config_of(script: str, environ: dict[str, str] | None = None, **arguments: str) -> LaunchConfig:
    return build_config(
        {name.replace("_", "-"): text for name, text in arguments.items()},
        script,
        ("--steps", "3"),
        read_environment(environ or {}),
        root=Path("/nonexistent"),
        num_cores=16,
    )


def test_defaults_are_torchrun_s(script: str) -> None:
    config = config_of(script)
    assert config.entry.command("python") == ("python", "-u", script, "--steps", "3")
    assert (config.num_workers, config.max_restarts, config.role) == (1, 0, "default")
    assert config.monitor_interval == timedelta(seconds=0.1)
    assert config.shutdown_timeout == timedelta(seconds=30)
    assert (config.pod, config.log_dir, config.writes_logs) == (None, None, False)
    assert config.python == sys.executable
    assert config.omp_num_threads is None
    assert config.notices == ()
    assert config.run_id != config_of(script).run_id


def test_arguments_win_over_the_environment_and_that_over_defaults(script: str) -> None:
    environ = {"TPU_LAUNCH_MAX_RESTARTS": "3", "TPU_LAUNCH_NPROC_PER_NODE": "2"}
    config = config_of(script, environ, max_restarts="5")
    assert (config.max_restarts, config.num_workers, config.role) == (5, 2, "default")


def test_an_empty_variable_is_none(script: str) -> None:
    assert config_of(script, {"TPU_LAUNCH_MAX_RESTARTS": ""}).max_restarts == 0


def test_an_error_names_the_variable_it_came_from(script: str) -> None:
    with pytest.raises(LaunchError, match="^TPU_LAUNCH_MAX_RESTARTS 'many': expected a whole"):
        config_of(script, {"TPU_LAUNCH_MAX_RESTARTS": "many"})


def test_a_variable_without_a_setting_is_pointed_out(script: str) -> None:
    (notice,) = config_of(script, {"TPU_LAUNCH_NPROC": "4"}).notices
    assert "TPU_LAUNCH_NPROC is set, and no setting has that name" in notice


@pytest.mark.parametrize(
    ("workers", "threads"), [("1", None), ("2", 8), ("3", 5), ("16", 1), ("40", 1)]
)
def test_cores_are_shared_among_workers(script: str, workers: str, threads: int | None) -> None:
    config = config_of(script, nproc_per_node=workers)
    assert config.omp_num_threads == threads
    assert len(config.notices) == (threads is not None)


def test_a_chosen_thread_count_is_left_alone(script: str) -> None:
    config = config_of(script, {"OMP_NUM_THREADS": "4"}, nproc_per_node="2")
    assert (config.omp_num_threads, config.notices) == (None, ())


@pytest.mark.parametrize(
    "accepted",
    [
        {"nnodes": "1"},
        {"nnodes": "1:1", "standalone": "True"},
        {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "rdzv_id": "job"},
    ],
)
def test_ways_to_say_one_host_are_accepted(script: str, accepted: dict[str, str]) -> None:
    assert config_of(script, **accepted).pod is None


def test_other_kinds_of_entry(script: str, tmp_path: Path) -> None:
    assert config_of("json.tool", module="1").entry.command("py")[:4] == (
        *("py", "-u", "-m"),
        "json.tool",
    )
    assert config_of("sh", no_python="1").entry.command("py") == ("sh", "--steps", "3")
    run_path = config_of(script, run_path="1").entry
    assert run_path.kind is EntryKind.RUN_PATH
    assert run_path.command("py")[-3:] == (script, "--steps", "3")


def test_python_exec_chooses_the_interpreter_as_for_torchrun(script: str) -> None:
    environ = {"PYTHON_EXEC": "sh"}
    assert config_of(script, environ).python == "sh"
    with pytest.raises(LaunchError, match="PYTHON_EXEC '/no/python': no such interpreter"):
        config_of(script, {"PYTHON_EXEC": "/no/python"})
    # Another interpreter may have modules that this one has not.
    assert config_of("only_there", environ, module="1").entry.target == "only_there"


def test_streams_are_given_for_all_or_by_rank() -> None:
    both = Streams.BOTH
    assert parse_streams(None, num_workers=2) == {0: Streams.NONE, 1: Streams.NONE}
    assert parse_streams(Setting("3", "-t"), num_workers=2) == {0: both, 1: both}
    by_rank = parse_streams(Setting("0:1,11:2", "-t"), num_workers=12)
    assert (by_rank[0], by_rank[1], by_rank[11]) == (
        *(Streams.STDOUT, Streams.NONE),
        Streams.STDERR,
    )


def test_flags_from_the_environment() -> None:
    assert [parse_flag(Setting(text, "X")) for text in ("1", "true", "0", "False")] == [
        *(True, True),
        *(False, False),
    ]
    with pytest.raises(LaunchError, match="X 'maybe': expected one of 1, true"):
        parse_flag(Setting("maybe", "X"))


def test_ranks() -> None:
    assert parse_ranks(None, num_workers=2) is None
    assert parse_ranks(Setting("0,2,2", "X"), num_workers=3) == {0, 2}


def test_a_config_checks_itself(script: str) -> None:
    config = config_of(script)
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        LaunchConfig(entry=config.entry, run_id="x", num_workers=0, redirects={}, tee={})
