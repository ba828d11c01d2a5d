"""torch.tpu and torch.accelerator, as programs that know torch.cuda use them."""

import os
import subprocess
import sys
import time

import pytest
import torch


def test_there_is_one_device() -> None:
    assert (torch.tpu.device_count(), torch.tpu.current_device()) == (1, 0)
    assert torch.tpu.is_available()
    torch.tpu.set_device(0)
    torch.tpu.set_device("tpu:0")
    with pytest.raises(ValueError, match="one TPU device"):
        torch.tpu.set_device(torch.device("tpu", 1))
    with torch.tpu.device(0), torch.tpu.device_of(torch.ones(1, device="tpu")):
        assert torch.ones(1, device="tpu").device.index == 0


def test_the_stand_in_says_what_it_is() -> None:
    assert torch.tpu.get_device_name() == "CPU (TPU stand-in)"
    properties = torch.tpu.get_device_properties(0)
    assert properties.total_memory > 1 << 28 and properties.platform == "cpu"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"),
     ("TPU7x", "v7x")],
)  # fmt: skip
def test_kinds_of_tpu_are_named_as_people_name_them(kind: str, name: str) -> None:
    from tpu_dist.runtime.device.properties import _NAMES

    assert _NAMES[kind] == f"TPU {name}"


def test_memory_is_counted() -> None:
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    x = torch.ones(1 << 18, device="tpu")
    x.add_(1)
    assert torch.tpu.memory_allocated() >= before + (1 << 20)
    peak = torch.tpu.max_memory_allocated()
    del x
    assert torch.tpu.memory_allocated() < peak == torch.tpu.max_memory_allocated()
    stats = torch.tpu.memory_stats()
    assert stats["active_bytes.all.peak"] == peak
    assert {"reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"} <= stats.keys()
    torch.tpu.empty_cache()
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total


def test_events_are_reached_when_what_they_follow_is() -> None:
    start, end = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(600, 600, device="tpu")
    torch.tpu.synchronize()
    began = time.perf_counter()
    start.record()
    for _ in range(8):
        x = x @ x / 600
    end.record()
    end.synchronize()
    took = (time.perf_counter() - began) * 1e3
    assert end.query() and start.query()
    assert 0 < start.elapsed_time(end) <= took + 1
    with pytest.raises(ValueError, match="enable_timing"):
        torch.tpu.Event().elapsed_time(end)


def test_streams_nest_and_order() -> None:
    outer = torch.tpu.current_stream()
    side = torch.tpu.Stream(priority=-1)
    with torch.tpu.stream(side):
        assert torch.tpu.current_stream() is side
        y = torch.ones(4, device="tpu") * 2
        event = side.record_event()
    assert torch.tpu.current_stream() is outer
    outer.wait_stream(side)
    outer.wait_event(event)
    y.record_stream(outer)
    torch.tpu.synchronize()
    assert side.query() and y.sum().item() == 8


def test_the_accelerator_is_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    torch.accelerator.synchronize()
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_stream() == torch.tpu.current_stream()
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated()
    assert torch.accelerator.current_device_index() == 0


def test_seeds_and_autocast_are_known() -> None:
    torch.manual_seed(11)
    assert torch.tpu.initial_seed() == 11
    assert torch.tpu.get_rng_state().numel() == 16
    assert torch.bfloat16 in torch.tpu.get_amp_supported_dtype()
    with pytest.raises(ValueError, match="16 bytes"):
        torch.tpu.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/",
        env={**os.environ, "TPU_DIST_PLATFORM": "cpu", **environment},
    )  # fmt: skip


def test_asking_about_the_device_starts_no_client() -> None:
    code = (
        "import torch, sys\n"
        "torch.tpu.is_available(), torch.tpu.device_count(), torch.tpu.set_device(0)\n"
        "torch.device('tpu'), torch.manual_seed(1), torch.tpu.memory_allocated()\n"
        "torch.accelerator.is_available(), torch.tpu.synchronize()\n"
        "print('jax' in sys.modules, torch.tpu.is_initialized())"
    )
    assert run(code).stdout == "False False\n", run(code).stderr


def test_a_tensor_before_init_process_group_is_refused_among_several_processes() -> None:
    done = run("import torch; torch.ones(2, device='tpu')", WORLD_SIZE="2", RANK="0")
    assert done.returncode == 1
    assert "Call init_process_group('tpu_dist') first" in done.stderr


def test_a_process_group_of_one_takes_up_the_device_that_is_there() -> None:
    code = (
        "import torch, torch.distributed as dist\n"
        "x = torch.ones(3, device='tpu')\n"
        "dist.init_process_group('tpu_dist', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(x)\n"
        "print((x + 1).tolist())\n"
        "dist.destroy_process_group()"
    )
    assert run(code).stdout == "[2.0, 2.0, 2.0]\n", run(code).stderr


def test_a_forked_child_is_told_that_it_cannot_use_the_device() -> None:
    code = (
        "import torch, os\n"
        "x = torch.ones(2, device='tpu'); x + x\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    torch.manual_seed(1); print(torch.tpu._is_in_bad_fork(), flush=True)\n"
        "    try: x + x\n"
        "    except Exception as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0); print((x + x).tolist())"
    )
    said = run(code).stdout
    assert "True" in said and "Use the start method 'spawn'" in said and "[2.0, 2.0]" in said
