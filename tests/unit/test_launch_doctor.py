"""tpu-launch doctor: what it finds on hosts of several kinds, and its exit status."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from fake_hosts import metadata_server, vfio_host

from tpu_dist.launch.cli import main
from tpu_dist.launch.doctor import HUGE_PAGES, LOCK_FILE, Finding, Level, Machine, examine
from tpu_dist.launch.environment import read_environment
from tpu_dist.launch.holders import listener_on
from tpu_dist.topology.source_metadata import MetadataServer


def found(root: Path, environ: dict[str, str] | None = None, **machine: object) -> list[Finding]:
    return examine(
        Machine(environment=read_environment(environ or {}), root=root, **machine),  # type: ignore[arg-type]
        all_reduce=False,
    )


def of(topic: str, findings: list[Finding]) -> list[tuple[Level, str]]:
    return [(each.level, each.text) for each in findings if each.topic == topic]


def add_process(root: Path, pid: int, command: str, *files: str) -> None:
    """Add a process with open files to the /proc under `root`."""
    descriptors = root / f"proc/{pid}/fd"
    descriptors.mkdir(parents=True)
    (root / f"proc/{pid}/cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    for number, file in enumerate(files):
        (descriptors / str(number)).symlink_to(file)


@pytest.fixture
def v6e(tmp_path: Path) -> Path:
    vfio_host(tmp_path, "0x006f", chips=8, nodes=8)
    return tmp_path


def test_a_host_without_a_tpu_is_no_fault(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert of("slice", findings) == [(Level.NOTE, "no TPU: programs run on the CPU stand-in")]
    assert of("chips", findings) == [(Level.NOTE, "none on the PCI bus")]


def test_each_source_is_shown_and_what_is_taken(v6e: Path) -> None:
    attributes = {
        "agent-worker-number": "1",
        "accelerator-type": "v6e-16",
        "worker-network-endpoints": "a:b:10.0.0.1,c:d:10.0.0.2",
    }
    with metadata_server(attributes) as address:
        findings = found(v6e, {"TPU_TOPOLOGY": "4x4"}, metadata=MetadataServer(address=address))
    assert of("source: variables", findings)[0][1] == "shape 4x4x1 (TPU_TOPOLOGY=4x4)"
    ((_, of_server),) = of("source: metadata server", findings)
    assert "host 1 (metadata agent-worker-number=1)" in of_server
    assert "generation v6e (the v6e chips on the PCI bus)" in of("source: PCI bus", findings)[0][1]
    ((level, text),) = of("slice", findings)
    assert level is Level.FINE
    assert text.startswith("v6e:4x4, 2 hosts; this is host 1 of slice 0. Taken: ")
    assert "shape by TPU_TOPOLOGY=4x4" in text
    assert of("address", findings)[0][1].startswith("10.0.0.2, by metadata worker-network")


def test_sources_that_contradict_each_other_are_a_fault_that_names_both(v6e: Path) -> None:
    ((level, text),) = of("slice", found(v6e, {"TPU_ACCELERATOR_TYPE": "v5p-8"}))
    assert level is Level.FAULT
    assert "v5p by TPU_ACCELERATOR_TYPE=v5p-8" in text and "v6e chips on the PCI bus" in text


def test_who_holds_a_chip_is_named_with_its_command(v6e: Path) -> None:
    add_process(v6e, 4711, "python old_train.py", "/dev/vfio/3", "/dev/vfio/0", "/dev/null")
    add_process(v6e, 4712, "vfio-user", "/dev/vfio/vfio")
    first, *others = of("chips", found(v6e))
    assert first == (Level.FINE, "8 v6e, 8 devices")
    assert others == [
        (
            Level.FAULT,
            "/dev/vfio/0, /dev/vfio/3 held by pid 4711 (python old_train.py): end it before a run",
        )
    ]


def test_chips_that_the_container_was_not_given_are_a_fault(tmp_path: Path) -> None:
    vfio_host(tmp_path, "0x006f", chips=8, nodes=4)
    assert of("chips", found(tmp_path))[0] == (
        Level.FAULT,
        "8 v6e, 4 devices; 4 without a file in /dev: give them to this container",
    )


def test_a_lock_file_is_stale_when_nobody_holds_a_chip(v6e: Path) -> None:
    assert of("lock file", found(v6e)) == [(Level.FINE, "none")]
    lock = v6e / LOCK_FILE
    lock.parent.mkdir()
    lock.touch()
    ((level, text),) = of("lock file", found(v6e))
    assert level is Level.FAULT and "is left over, nobody holds a chip: remove it" in text
    add_process(v6e, 4711, "python train.py", "/dev/vfio/3")
    ((level, text),) = of("lock file", found(v6e))
    assert level is Level.FINE and "a chip is in use" in text


@pytest.mark.parametrize(
    ("pages", "level"),
    [("[always] madvise never\n", Level.FINE), ("always [madvise] never\n", Level.NOTE)],
)
def test_huge_pages_are_advised_where_they_are_off(v6e: Path, pages: str, level: Level) -> None:
    file = v6e / HUGE_PAGES
    file.parent.mkdir(parents=True)
    file.write_text(pages)
    ((found_level, text),) = of("huge pages", found(v6e))
    assert found_level is level
    assert ("echo always" in text) == (level is Level.NOTE)


def test_a_listener_is_found_by_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        holder = listener_on(port)
        assert holder is not None and holder.pid == os.getpid()
    assert listener_on(port) is None


def test_the_command_prints_json_and_its_status_says_whether_there_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    status = main(["doctor", "--json", "--no-all-reduce"])
    findings = json.loads(capsys.readouterr().out)
    assert {"slice", "chips", "ports", "address", "versions"} <= {f["topic"] for f in findings}
    assert {f["level"] for f in findings} <= {"ok", "note", "fault"}
    assert status == any(f["level"] == "fault" for f in findings)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-7")
    assert main(["doctor", "--no-all-reduce"]) == 1
    assert "fault source: variables" in capsys.readouterr().out
