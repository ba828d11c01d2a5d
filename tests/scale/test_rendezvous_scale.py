"""The rendezvous with many hosts: that all are served, and how much the service takes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tpu_dist.launch.cli import main
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.service.simulation import SimulationConfig, Step, simulate
from tpu_dist.topology.system import System

pytestmark = pytest.mark.timeout(300)

MEGABYTES = 250  # of 2,048 hosts


@pytest.mark.parametrize(
    ("num_hosts", "topology"), [(300, None), (512, "v6e:16x16*8"), (2048, "v6e:16x16*32")]
)
def test_all_hosts_are_ranked_told_and_found_again(num_hosts: int, topology: str | None) -> None:
    steps: list[Step] = []
    config = SimulationConfig(
        num_hosts=num_hosts,
        system=System.parse(topology) if topology else None,
        losses=1,
        server_restarts=1,
    )
    asyncio.run(simulate(config, steps.append))  # raises where a host is left out
    assert len(steps) == 4
    assert max(step.server_megabytes for step in steps) < MEGABYTES


def test_the_command_prints_and_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "steps.json"
    assert main(["simulate", "--topology", "v5p:4x4x4*2", "--json", str(file)]) == 0
    assert "32 hosts join and are ranked" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["hosts"] == 32
    assert [step["seconds"] > 0 for step in found["steps"]] == [True] * 3


def test_what_cannot_be_simulated_is_refused() -> None:
    assert main(["simulate"]) == 2
    with pytest.raises(LaunchError, match="has 32 hosts, and --hosts says 3"):
        SimulationConfig(num_hosts=3, system=System.parse("v5p:4x4x4*2"))
