"""What `import torch` runs of ours: it registers a name, and breaks nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAY = "print('TPU_DIST' in dist.Backend._plugins and dist.Backend._plugins['TPU_DIST'])"
IMPORT = "import torch, torch.distributed as dist"


def run(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter, with more places to import from."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TPU_DIST")}
    inherited.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**inherited, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
    )


def lines(code: str, *path: Path, **environment: str) -> list[str]:
    done = run(code, *path, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def torch_tpu(tmp_path: Path) -> Path:
    """A package of that name, installed with an entry point that registers the same backend."""
    package = tmp_path / "torch_tpu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def register():\n"
        "    import torch.distributed as dist\n"
        "    if 'TPU_DIST' not in dist.Backend._plugins:\n"
        "        dist.Backend.register_backend('tpu_dist', lambda *a: 1, devices=['cpu', 'tpu'])\n"
    )
    info = tmp_path / "torch_tpu-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu:register\n")
    (info / "RECORD").write_text("")
    return tmp_path


def test_importing_torch_is_enough_and_starts_no_jax() -> None:
    code = (
        f"{IMPORT}; import sys; {SAY}; print('jax' in sys.modules)\n"
        "print(sorted(dist.Backend.backend_capability['tpu_dist']))\n"
        "from tpu_dist import _autoload; _autoload.register(); _autoload.register()\n" + SAY
    )
    backend, jax, devices, again = lines(code)
    assert "_create_process_group" in backend and again == backend
    assert jax == "False" and devices == "['cpu', 'tpu']"


def test_importing_the_package_starts_nothing() -> None:
    code = (
        "import sys, threading, tpu_dist\n"
        "print('jax' in sys.modules, 'torch' in sys.modules, threading.active_count())"
    )
    assert lines(code) == ["False False 1"]


def test_a_group_starts_without_all_of_dynamo() -> None:
    """Its import is seconds of CPU time, in every rank."""
    code = (
        f"{IMPORT}; import sys, torch\n"
        "dist.init_process_group('tpu_dist', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1)); dist.barrier()\n"
        "print('torch._dynamo' in sys.modules)\n"
        "dist.destroy_process_group()"
    )
    assert lines(code, TPU_DIST_PLATFORM="cpu") == ["False"]


@pytest.mark.parametrize("order", ["torch, tpu_dist", "tpu_dist, torch"])
def test_with_autoload_off_importing_the_package_is_enough(order: str) -> None:
    code = f"import {order}; import torch.distributed as dist; {SAY}"
    (backend,) = lines(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "_create_process_group" in backend


def test_torch_tpu_keeps_the_name_when_both_are_installed(torch_tpu: Path) -> None:
    done = run(f"{IMPORT}; {SAY}", torch_tpu)
    assert done.returncode == 0, done.stderr
    assert "_create_process_group" not in done.stdout and "_BackendPlugin" in done.stdout
    assert done.stderr.count("leaving the name to torch_tpu. Set TPU_DIST_PREFER=1") == 1


def test_we_take_the_name_when_asked_to(torch_tpu: Path) -> None:
    done = run(f"{IMPORT}; {SAY}", torch_tpu, TPU_DIST_PREFER="1")
    assert done.returncode == 0, done.stderr
    assert "_create_process_group" in done.stdout
    assert "leaving the name" not in done.stderr


def test_a_torch_tpu_that_is_broken_does_not_break_us(torch_tpu: Path) -> None:
    (torch_tpu / "torch_tpu/__init__.py").write_text("def register(): pass\nraise ValueError")
    done = run("from tpu_dist import _autoload; _autoload.register(); print('alive')", torch_tpu,
               TORCH_DEVICE_BACKEND_AUTOLOAD="0")  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_an_error_in_registering_leaves_torch_unharmed() -> None:
    code = (
        f"{IMPORT}; {SAY}\n"  # autoload is off: torch alone does not know the name
        "from tpu_dist import _autoload\n"
        "def refuse(*args, **kwargs): raise RuntimeError('names are full')\n"
        "there, dist.Backend.register_backend = dist.Backend.register_backend, refuse\n"
        "dist.Backend._plugins.clear(); _autoload.register()\n"
        "print(torch.ones(2).sum().item())\n"
        "dist.Backend.register_backend = there\n"
        "dist.is_available = lambda: False\n"
        "_autoload.register()\n" + SAY
    )
    done = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (0, "False\n2.0\nFalse\n"), done.stderr
    assert done.stderr.count("could not register its backend; the rest of torch is unharmed") == 1
    assert "names are full" in done.stderr
