"""tpu-launch on several hosts: who is who, and what happens when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_harness import eventually
from pods import Pods, pods, said, send, stop

from tpu_dist.launch.holders import listener_on

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pods]:
    with pods(tmp_path) as running:
        yield running


NOTE_ENVIRONMENT = 'note("environment", dict(os.environ))'
FAIL_ON_1 = """
def main():
    if RANK == 1 and ATTEMPT < FAILURES:
        time.sleep(0.1)
        raise ValueError("loss is not finite")
    if ATTEMPT < FAILURES:
        note("runs", os.getpid())
        sleep_for_ever()
    note("runs", os.getpid())
main()
"""


def test_workers_of_all_hosts_are_one_run(pod: Pods) -> None:
    hosts = pod.run("--nproc-per-node=2", pod.script(NOTE_ENVIRONMENT))
    assert pod.status == {"a": 0, "b": 0}
    environments = [
        hosts[name].note("environment", rank=rank)
        for name, ranks in (("a", (0, 1)), ("b", (2, 3)))
        for rank in ranks
    ]
    for rank, environment in enumerate(environments):
        wanted = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "GROUP_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        assert wanted.items() <= environment.items()
    assert len({environment["MASTER_PORT"] for environment in environments}) == 1


def test_ranks_follow_the_topology_and_not_names_or_arrival(pod: Pods) -> None:
    script = pod.script(NOTE_ENVIRONMENT)
    slice_ = {
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2",
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_PLATFORMS": "cpu",
        "TPU_LAUNCH_TOKEN": "a secret of this job",
    }
    chips = {"TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
    late = pod.start("a", script, TPU_WORKER_ID="1", **slice_, **chips)
    early = pod.start("z", script, TPU_WORKER_ID="0", **slice_, **chips)
    assert (late.wait(), early.wait()) == (0, 0)
    assert early.note("environment", rank=0)["GROUP_RANK"] == "0"
    environment = late.note("environment", rank=1)
    assert environment["GROUP_RANK"] == "1"
    assert "TPU_LAUNCH_TOKEN" not in environment  # no secret of the launcher's
    pod.nothing_is_left()


def test_a_failure_ends_all_hosts_and_its_traceback_is_the_last_thing_that_each_says(
    pod: Pods,
) -> None:
    hosts = pod.run(pod.script(f"FAILURES = 1\n{FAIL_ON_1}"))
    assert pod.status == {"a": 1, "b": 1}
    for launch in hosts.values():
        assert "rank 1 exited with status 1" in launch.stderr
        assert "host b, " in launch.stderr
        last = launch.stderr.splitlines()
        start = max(n for n, line in enumerate(last) if line.startswith("Traceback (most recent"))
        assert last[-1] == "ValueError: loss is not finite"
        assert all("tpu-launch" not in line for line in last[start:])
        assert 'raise ValueError("loss is not finite")' in "\n".join(last[start:])


def test_all_hosts_start_anew_after_a_failure_and_logs_are_kept_apart(pod: Pods) -> None:
    script = pod.script(f"FAILURES = 2\n{FAIL_ON_1}\nprint('attempt', ATTEMPT, file=sys.stderr)")
    hosts = {
        name: pod.start(name, "--max-restarts=2", f"--log-dir=logs-{name}", script)
        for name in ("b", "a")
    }
    assert {name: launch.wait() for name, launch in hosts.items()} == {"a": 0, "b": 0}
    for rank, (name, launch) in enumerate(sorted(hosts.items())):
        assert "on host b, rank 1 (pid " in launch.stderr
        assert "ValueError" in launch.stderr or name == "a"
        assert "(restart 2 of 2)" in launch.stderr
        logs = sorted((pod.runs.home / f"logs-{name}").glob("*/attempt_*/0/stderr.log"))
        assert [log.parts[-3] for log in logs] == [f"attempt_{n}" for n in range(3)]
        assert "attempt 2\n" in logs[2].read_text()
        assert ("loss is not finite" in logs[0].read_text()) == (rank == 1)
    pod.nothing_is_left()


def test_a_killed_launcher_is_named_and_its_successor_takes_its_rank(pod: Pods) -> None:
    script = pod.script("note('runs', os.getpid())\nATTEMPT or sleep_for_ever()")
    hosts = {name: pod.start(name, "--max-restarts=1", script) for name in "ba"}
    worker = hosts["a"].note("runs", rank=0)
    hosts["b"].note("runs", rank=1)
    # The first host's launcher: the service beside it lives on.
    hosts["a"].signal(signal.SIGKILL)
    said(hosts["b"], "host a is lost: its connection ended")
    eventually(lambda: not Path(f"/proc/{worker}").exists(), "its worker ends with it")
    again = pod.start("a", "--max-restarts=1", script)
    assert (again.wait(), hosts["b"].wait()) == (0, 0)
    assert again.note("runs", rank=0, attempt=1)
    pod.nothing_is_left()


def test_a_launcher_that_is_stopped_is_named_and_ends_the_run(pod: Pods) -> None:
    script = pod.script("note('runs')\nsleep_for_ever()")
    hosts = {name: pod.start(name, script) for name in "ba"}
    for rank, name in enumerate("ab"):
        hosts[name].note("runs", rank=rank)
    stop(hosts["b"])
    assert hosts["a"].wait(30) == 1
    assert "host b is lost" in hosts["a"].stderr
    hosts["b"].kill_all()
    pod.nothing_is_left()


def test_a_launcher_that_was_stopped_for_too_long_starts_anew_with_the_others(pod: Pods) -> None:
    script = pod.script("note('runs')\nATTEMPT or sleep_for_ever()")
    hosts = {name: pod.start(name, "--max-restarts=1", script) for name in "ba"}
    for rank, name in enumerate("ab"):
        hosts[name].note("runs", rank=rank)
    stop(hosts["b"])
    said(hosts["a"], "host b is lost", 30)
    hosts["b"].signal(signal.SIGCONT)
    assert {name: launch.wait(30) for name, launch in hosts.items()} == {"a": 0, "b": 0}
    pod.nothing_is_left()


def test_hosts_that_never_come_end_the_wait_and_are_counted(pod: Pods) -> None:
    script = pod.script("note('runs')")
    launch = pod.start("a", "--rdzv-conf=join_timeout=1", script, hosts=3)
    assert launch.wait() == 1
    assert (
        "only 1 of 3 hosts came within 1 s. Missing: 2 that never came (here: a)" in launch.stderr
    )
    assert not list(launch.notes.iterdir())
    pod.nothing_is_left()


def test_a_service_that_dies_is_started_anew_and_the_workers_notice_nothing(pod: Pods) -> None:
    script = pod.script("note('runs')\nwait_for('go', 0)")
    hosts = {name: pod.start(name, script) for name in "ba"}
    for rank, name in enumerate("ab"):
        hosts[name].note("runs", rank=rank)
    (service,) = pod.services()
    send(service, signal.SIGKILL)
    for launch in hosts.values():
        said(launch, "is there again")
    for launch in hosts.values():
        (launch.notes / "go.0.0").touch()
    assert {name: launch.wait() for name, launch in hosts.items()} == {"a": 0, "b": 0}
    assert all("anew" not in launch.stderr for launch in hosts.values())
    pod.nothing_is_left()


def test_ctrl_c_on_one_host_is_what_the_others_are_told(pod: Pods) -> None:
    script = pod.script("note('runs')\nsleep_for_ever()")
    hosts = {name: pod.start(name, "--shutdown-timeout=2", script) for name in "ba"}
    for rank, name in enumerate("ab"):
        hosts[name].note("runs", rank=rank)
    hosts["b"].signal(signal.SIGINT)
    assert hosts["b"].wait() == 130
    assert hosts["a"].wait() == 1
    assert "host b is lost" in hosts["a"].stderr
    assert "its launcher was ended by SIGINT" in hosts["a"].stderr
    pod.nothing_is_left()


def test_a_worker_that_ignores_its_end_is_killed_so_that_the_round_ends(pod: Pods) -> None:
    script = pod.script(
        """
        if RANK == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen(["sleep", "300"])
            note("deaf", child.pid)
            sleep_for_ever()
        while not list(NOTES.parent.parent.glob("*/notes/deaf.0.0")):
            time.sleep(0.01)
        sys.exit(5)
        """
    )
    pod.run("--shutdown-timeout=0.5", script)  # looks whether the child is left, too
    assert pod.status == {"a": 5, "b": 5}


def test_what_belongs_to_another_run_is_told_so(pod: Pods) -> None:
    script = pod.script("note('runs')\nsleep_for_ever()")
    first = pod.start("a", "--rdzv-id=one", script)
    said(first, "joins run 'one'")
    eventually(pod.services, "the service is there")
    second = pod.start("b", "--rdzv-id=two", script)
    assert second.wait() == 1
    assert "host b is of run 'two', and here is run 'one'" in second.stderr
    first.signal(signal.SIGTERM)
    assert first.wait() == 143
    pod.nothing_is_left()


def test_a_stranger_on_the_port_is_named_at_once(pod: Pods) -> None:
    code = (
        f"import socket, time; s = socket.create_server(('127.0.0.1', {pod.port})); time.sleep(60)"
    )
    stranger = subprocess.Popen([sys.executable, "-c", code])
    try:
        eventually(lambda: listener_on(pod.port), "the stranger listens")
        launch = pod.start("a", pod.script("note('runs')"))
        assert launch.wait() == 2
        assert f"port {pod.port} is taken by pid {stranger.pid} (" in launch.stderr
        assert not list(launch.notes.iterdir())
    finally:
        stranger.kill()
        stranger.wait()


def test_a_service_that_stands_alone_serves_several_runs(pod: Pods, tmp_path: Path) -> None:
    script = pod.script("note('runs')")
    said_by = tmp_path / "service"
    # A command as users have it: who is on the port is known by that.
    command = [sys.executable, "-m", "tpu_dist.launch", "serve", "--host=127.0.0.1"]
    with said_by.open("w") as log:
        service = subprocess.Popen([*command, f"--port={pod.port}", "--metrics-port=0"], stderr=log)
    try:
        _serves_two_runs(pod, script, service, said_by)
    finally:
        service.kill()
        service.wait()


def _serves_two_runs(
    pod: Pods, script: Path, service: subprocess.Popen[bytes], said_by: Path
) -> None:
    eventually(
        lambda: "metrics at http://127.0.0.1:" in said_by.read_text(), "the service is there"
    )
    hosts = [
        pod.start(name, f"--rdzv-id={run}", script) for run in ("one", "two") for name in ("a", "b")
    ]
    assert [launch.wait() for launch in hosts] == [0, 0, 0, 0]
    assert pod.services() == []  # none of their own
    page = said_by.read_text().partition("metrics at ")[2].split()[0]
    with urllib.request.urlopen(page, timeout=10) as answer:
        assert "tpu_launch_rounds_total 2\n" in answer.read().decode()
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0
    assert "run one has ended: all workers ended well" in said_by.read_text()


def test_torchrun_takes_the_rendezvous_by_its_entry_point(pod: Pods, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["torchrun.handlers"].items()
    metadata = tmp_path / "site" / "handlers-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: handlers\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torchrun.handlers]\n{entry[0]} = {entry[1]}\n")
    script = tmp_path / "plain.py"
    script.write_text(
        """
import os, pathlib, sys, time
once = pathlib.Path(os.environ["ONCE"])
if os.environ["RANK"] == "1":
    if not once.exists():
        once.touch()
        sys.exit(3)
    once.with_name("again").touch()
while not once.with_name("again").exists():  # torchrun's agents do not come back from the end
    time.sleep(0.01)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{metadata.parent}",
        "ONCE": str(tmp_path / "once"),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *(f"--rdzv-backend={entry[0]}", f"--rdzv-endpoint=127.0.0.1:{pod.port}"),
        *("--rdzv-id=job", "--max-restarts=1", str(script)),
    )
    hosts = [
        subprocess.Popen(
            command,
            env={**environment, "TPU_LAUNCH_NODE_NAME": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in "ba"
    ]
    try:
        printed = [host.communicate(timeout=60)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], printed
    assert "rank 1 of 2" in printed[0] and "rank 0 of 2" in printed[1]


def test_the_doctor_tries_the_devices(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tpu_dist.launch", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=80,
    )
    (found,) = [each for each in json.loads(done.stdout) if each["topic"] == "all_reduce"]
    assert found["level"] == "ok", found
    assert "of 1 MiB by 2 ranks in 2 s, all right" in found["text"]
