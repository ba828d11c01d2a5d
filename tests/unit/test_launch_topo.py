"""tpu-launch topo: the drawing as text and as PNG, and what is refused."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_dist.launch.cli import main
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.mesh_option import parse_mesh

V6E_2X4_GROUPS = """\
v6e:2x4: 8 chips, 8 devices, 1 host; chips of a host: 2x4x1
axes: x 2 (line), y 4 (line); a link: 90 GB/s a direction
bisection of a slice: 2 links, 360 GB/s both ways; farthest chips: 4 hops
in all: 256 GiB HBM, 7,344 bf16 TFLOP/s
mesh: dp=2: chips apart from each other (y[2] every 2), 0.5 links
mesh: tp=4: a block (x[2] x y[2]), 2 links
groups of tp, by chip:
     y=0 y=1 y=2 y=3
    +host 0---------+
x=0 | 0   0   1   1 |
x=1 | 0   0   1   1 |
    +---------------+
"""


def drawn(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["topo", *options]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["topo", *options]) == 2
    return capsys.readouterr().err


def test_a_slice_with_the_groups_of_an_axis(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--topology", "v6e:2x4", "--mesh", "dp=2,tp=4", "--axis", "tp")
    assert drawn(capsys, *options) == V6E_2X4_GROUPS


def test_ranks_are_drawn_in_each_order(capsys: pytest.CaptureFixture[str]) -> None:
    slice_ = ("--topology", "v6e:2x4")
    rows = {
        "hosts": ("x=0 | 0   2   4   6 |", "x=1 | 1   3   5   7 |"),
        "row-major": ("x=0 | 0   1   2   3 |", "x=1 | 4   5   6   7 |"),
        "mesh": ("x=0 | 0   1   4   5 |", "x=1 | 2   3   6   7 |"),
    }
    for order, expected in rows.items():
        text = drawn(capsys, *slice_, "--order", order, "--mesh", "dp=2,tp=4")
        assert tuple(text.splitlines()[-3:-1]) == expected, order
    assert "x=0 | 0   2   4   6 |" in drawn(capsys, *slice_), "torchrun's order unless asked"
    assert "x=0 | 0,1   4,5 |" in drawn(capsys, "--topology", "tpu7x:2x2x1")


def test_hosts_of_either_size_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    four = drawn(capsys, "--topology", "v5e:4x8")
    eight = drawn(capsys, "--topology", "v5e:4x8", "--chips-per-host", "8")
    assert "host 7" in four and "8 hosts" in four
    assert "host 4" not in eight and "4 hosts" in eight


def test_a_large_slice_is_drawn_in_part_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    pod = ("--topology", "tpu7x:16x24x24")
    text = drawn(capsys, *pod)
    assert text.endswith("... and 8960 chips more of 16x24x24\n")
    assert len(text.splitlines()) < 80
    whole = drawn(capsys, *pod, "--all")
    assert "z = 23" in whole and "chips more" not in whole


def test_another_slice_has_its_own_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = drawn(capsys, "--topology", "v6e:2x2*3", "--slice", "2")
    assert "3 slices of v6e:2x2 over DCN, 12 chips" in text
    assert text.splitlines()[-3:-1] == ["x=0 | 8    10 |", "x=1 | 9    11 |"]


def test_without_a_name_it_is_this_host_s_slice() -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_WORKER_ID": "3",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tpu_dist.launch", "topo"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this is host 3 of slice 0, as found:\n")
    assert "  host: TPU_WORKER_ID=3\n" in done.stdout
    assert "v5e:4x4: 16 chips" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--topology", "v6e:3x4"], "there is no v6e:3x4"),
        (["--topology", "v6e:2x4", "--mesh", "dp=3"], "a mesh of .3,. has 3 places"),
        (["--topology", "v6e:2x4", "--mesh", "2,4"], "--mesh '2,4': expected names and sizes"),
        (["--topology", "v6e:2x4", "--axis", "tp"], "--axis needs a mesh"),
        (["--topology", "v6e:2x4", "--order", "mesh"], "--order mesh needs a mesh"),
        (["--topology", "v6e:2x4", "--order", "any"], "expected one of hosts, row-major, mesh"),
        (
            ["--topology", "v6e:2x4", "--mesh", "dp=2,tp=4", "--axis", "pp"],
            "--axis 'pp': the mesh has dp, tp",
        ),
        (["--topology", "v6e:2x4", "--slice", "1"], "--slice 1: v6e:2x4 has 1"),
        (["--topology", "v6e:2x4", "--slice", "one"], "--slice 'one': expected a whole number"),
        (["--topology", "v6e:2x4", "--plot", "a.jpg"], "expected the name of a .png file"),
        (["--topology", "v6e:2x4", "--plot", "/nowhere/a.png"], "No such file or directory"),
        (["--topology"], "requires an argument"),
        (["--frobnicate"], "No such option: --frobnicate .see tpu-launch topo --help"),
        (["v6e:2x4"], "unexpected extra argument"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    error = " ".join(refused(capsys, *options).split())
    assert re.search(said, error), error


@pytest.mark.parametrize(
    "text", ["dp=2,dp=4", "dp=0", "dp", "dp=2,", "=2", "dp=2;tp=4", "", "2=dp"]
)
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="expected names and sizes"):
        parse_mesh(text)


def test_the_png_is_as_large_as_the_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    for number, options in enumerate(
        [
            ("--topology", "v6e:2x4", "--mesh", "dp=2,tp=4", "--axis", "tp"),
            ("--topology", "tpu7x:4x4x8"),
        ]
    ):
        path = tmp_path / f"{number}.png"
        assert f"drawn in {path}" in drawn(capsys, *options, "--plot", str(path))
        header = path.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", header[16:])
        sizes.append(width * height)
    assert sizes[0] < sizes[1] < 10**7


def test_a_script_called_topo_is_still_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topo").mkdir()
    assert main(["./topo"]) == 2
    assert "a directory, and without a __main__.py" in capsys.readouterr().err
