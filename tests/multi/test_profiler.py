"""What the profiler shows of collectives: one asynchronous event each, with its shapes."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch.profiler import ProfilerActivity, profile

pytestmark = gloo_cannot("its events have its own names")


def profiled(rank: int) -> list[tuple[str, Any, bool]]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work = dist.all_reduce(torch.ones(3, 5), async_op=True)
        work.wait()
        dist.broadcast(torch.ones(300_000), src=1)
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
        share = torch.empty(4)
        dist.reduce_scatter_single(share, torch.ones(8))
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(7), dst=1)
        else:
            dist.recv(torch.empty(7), src=0)
    return [
        (event.name, event.input_shapes, event.is_async)
        for event in profiler.events()
        if event.name.startswith("tpu_dist:")
    ]


def test_each_call_is_one_asynchronous_event_with_its_shapes(pool2: RankPool) -> None:
    for rank, events in enumerate(pool2(profiled)):
        names = [name for name, _, _ in events]
        message = "send" if rank == 0 else "recv"
        verbs = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "barrier", message]
        assert sorted(names) == sorted(f"tpu_dist:{verb}" for verb in verbs)
        shapes = {name: shape for name, shape, _ in events}
        assert shapes["tpu_dist:all_reduce"] == [[3, 5]]
        assert shapes["tpu_dist:broadcast"] == [[300_000]]
        assert shapes["tpu_dist:reduce_scatter"] == [[8]]
        assert shapes["tpu_dist:barrier"] == []
        assert all(is_async for _, _, is_async in events)


def failed_and_unfinished(rank: int) -> list[str]:
    """Calls that fail, and one that ends after the profiler, leave it whole."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3 + rank))
        receives = dist.irecv(torch.empty(3), src=1 - rank)
    dist.isend(torch.ones(3), dst=1 - rank)
    receives.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()
    return [event.name for event in profiler.events() if event.name.startswith("tpu_dist:")]


def test_failed_calls_are_shown_and_unfinished_ones_break_nothing(pool2: RankPool) -> None:
    for names in pool2(failed_and_unfinished):
        assert "tpu_dist:all_reduce" in names


def traced(rank: int) -> dict[str, float]:
    """The trace that a user opens, written and read back."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(5):
            dist.all_reduce(torch.ones(300_000))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ours = [e for e in events if e.get("name") == "tpu_dist:all_reduce" and e.get("ph") == "X"]
    return {"events": len(ours), "longest": max(e["dur"] for e in ours)}


def test_a_chrome_trace_has_the_calls_and_how_long_they_took(pool2: RankPool) -> None:
    for trace in pool2(traced):
        assert trace["events"] == 5 and trace["longest"] > 0
