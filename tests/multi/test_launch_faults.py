"""A part of faults.py: faults at random moments end in a whole training or in a named error."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import run_fault
from pods import pods

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("fault", "ended"),
    [
        ("two launchers are killed, others come", "trained"),
        ("the service and a worker are killed", "trained"),
        ("a worker is killed, no restart left", "killed by SIGKILL"),
    ],
)
def test_four_hosts_survive_a_fault_or_name_it(tmp_path: Path, fault: str, ended: str) -> None:
    with pods(tmp_path) as pod:
        assert ended in run_fault(pod, fault, seed=1).ended
