"""wait() on device tensors orders, and does not block: who touches them waits, and is told."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from failures import Attempt, attempt
from ranks import RankPool, Ranks, gloo_cannot, mark, wait_mark
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tpu_dist.runtime.device import calls

pytestmark = gloo_cannot("it has no tensors on 'tpu'")

TIMEOUT = timedelta(seconds=1)


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def values(tensor: Tensor) -> list[float]:
    return tensor.cpu().flatten().tolist()


def in_place(x: Tensor) -> list[float]:
    x.mul_(2)
    return values(x / 2)


def partly(x: Tensor) -> list[float]:
    x[1:].add_(1)
    return [x[0].item(), *values(x[1:] - 1)]


def overwritten(x: Tensor) -> list[float]:
    x.copy_(torch.full((4,), 3.0, device="tpu"))
    return values(x)


def filled(x: Tensor) -> list[float]:
    x.fill_(3)
    torch.tpu.synchronize()
    return values(x)


def as_out(x: Tensor) -> list[float]:
    torch.add(torch.ones(4, device="tpu"), 2, out=x)
    torch.tpu.synchronize()
    return values(x)


def from_host(x: Tensor) -> list[float]:
    x.copy_(torch.full((4,), 3.0))
    torch.tpu.synchronize()
    return values(x)


def synchronised(x: Tensor) -> list[float]:
    torch.tpu.synchronize()
    return values(x)


def by_event(x: Tensor, timed: bool) -> list[float]:
    event = torch.tpu.Event(enable_timing=timed)
    event.record()
    if dist.get_rank() == 0:  # the other rank has called, but may not have got to it yet
        assert not (event.query() and torch.tpu.current_stream().query())
    event.synchronize()
    assert event.query()
    return values(x)


def freed(x: Tensor) -> list[float]:
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    torch.tpu.synchronize()
    x.fill_(3)
    return values(x)


def communicated(x: Tensor) -> list[float]:
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return values(x)


TOUCHES: dict[str, Callable[[Tensor], list[float]]] = {
    "item": lambda x: [e.item() for e in x],
    "cpu": values,
    "tolist": lambda x: x.tolist(),
    "an operator": lambda x: values(x + 0),
    "a view": lambda x: values(x.view(2, 2).t().t()),
    "as bytes": lambda x: values(x.view(torch.uint8).clone().view(torch.float32)),
    "clone": lambda x: values(x.clone()),
    "storage": lambda x: values(torch.empty(0).set_(x.untyped_storage().cpu())),
    "foreach": lambda x: values(torch._foreach_add([x], 0)[0]),
    "detach": lambda x: values(x.detach().data),
    "in place": in_place,
    "partly in place": partly,
    "copied over": overwritten,
    "filled": filled,
    "out=": as_out,
    "from the host": from_host,
    "synchronize": synchronised,
    "an event": partial(by_event, timed=False),
    "a timed event": partial(by_event, timed=True),
    "freed": freed,
    "the next collective": communicated,
}


def touch(rank: int, name: str) -> tuple[bool, list[float]]:
    dist.barrier()
    x = torch.full((4,), float(rank + 1), device="tpu")
    if rank == 1:  # calls when rank 0 has returned from wait(), and is about to touch
        wait_mark(0, f"returned {name}")
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return True, TOUCHES[name](x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    was_done = work.is_completed()
    mark(f"returned {name}")
    return was_done, TOUCHES[name](x)


@pytest.mark.parametrize("name", TOUCHES)
def test_whoever_touches_the_output_waits(pool2: RankPool, name: str) -> None:
    (was_done, first), (_, second) = pool2(touch, name)
    assert not was_done
    assert first == second == [3.0] * 4


def blocks(rank: int, how: str) -> bool:
    """Whether a call is done when its wait() has returned; rank 0 has nobody to wait for else."""
    dist.barrier()
    x = torch.ones(4, device="tpu")
    if rank == 1:
        dist.all_reduce(x) if how != "barrier" else dist.barrier()
        return True
    work = dist.all_reduce(x, async_op=True) if how != "barrier" else dist.barrier(async_op=True)
    if how == "future":
        work.get_future()
    work.wait(*[timedelta(seconds=20)] if how == "timeout" else [])
    return work.is_completed()


@pytest.mark.parametrize("how", ["timeout", "future", "barrier"])
def test_what_blocks_the_host_all_the_same(pool2: RankPool, how: str) -> None:
    assert pool2(blocks, how) == [True, True]


@pytest.mark.parametrize("variable", ["TPU_DIST_BLOCKING_WAIT", "TPU_LAUNCH_BLOCKING"])
def test_a_variable_makes_wait_block(variable: str) -> None:
    with Ranks(blocks, 2, args=["plain"], env={variable: "1"}) as ranks:
        assert [o.value for o in ranks.results(timedelta(seconds=60))] == [True, True]


def wait_with_a_limit(rank: int) -> Attempt:
    x = torch.ones(4, device="tpu")
    if rank == 1:
        wait_mark(0, "gave up")
    work = dist.all_reduce(x, async_op=True)
    result = attempt(lambda: work.wait(timedelta(seconds=0.2))) if rank == 0 else attempt(work.wait)
    mark("gave up")
    work.wait()  # the call itself goes on
    assert values(x) == [2.0] * 4
    return result


def test_an_explicit_timeout_is_kept(pool2: RankPool) -> None:
    gave_up, late = pool2(wait_with_a_limit)
    assert gave_up.error == "CollectiveTimeoutError" and "wait(0.2 s)" in gave_up.text
    assert late.ok


def mismatch(rank: int, how: str) -> tuple[Attempt, Attempt, list[float]]:
    x = torch.ones(3 + rank, device="tpu")
    called = attempt(lambda: dist.all_reduce(x))
    end = time.monotonic() + 20
    while calls.under_way() and time.monotonic() < end:
        time.sleep(0.01)  # it has failed before it is looked at
    if not called.error:
        how_seen: dict[str, Callable[[], Any]] = {
            "read": lambda: x.sum(),
            "written": lambda: x.fill_(4),
            "synchronize": torch.tpu.synchronize,
            "another is read": lambda: torch.ones(1, device="tpu").item(),
            "the next collective on it": lambda: dist.all_reduce(x),
        }
        called = attempt(how_seen[how])
    again = attempt(torch.tpu.synchronize)
    if how in ("synchronize", "another is read"):
        attempt(lambda: x.sum())  # the output was to be told, too
    y = torch.ones(2, device="tpu")
    dist.all_reduce(y)
    return called, again, values(x) + values(y)


@pytest.mark.parametrize(
    "how",
    ["read", "written", "synchronize", "another is read", "the next collective on it"],
)
def test_an_error_is_raised_where_it_is_seen_once_and_the_group_goes_on(
    pool2: RankPool, how: str
) -> None:
    for rank, (called, again, left) in enumerate(pool2(mismatch, how)):
        assert called.error == "MismatchError", called
        assert "rank 0 called all_reduce SUM float32 (3,)" in called.text
        assert "rank 1 called all_reduce SUM float32 (4,)" in called.text
        assert again.ok, again
        assert left == [1.0] * (3 + rank) + [2.0] * 2


def never_comes(rank: int) -> Attempt | None:
    x = torch.ones(4, device="tpu")
    dist.all_reduce(x)
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(TIMEOUT)
    if rank == 1:
        wait_mark(0, "gave up")
        return None
    y = torch.ones(4, device="tpu")
    dist.all_reduce(y)
    result = attempt(lambda: (y + 1).sum().item())
    mark("gave up")
    return result


def test_a_read_waits_no_longer_than_the_groups_timeout() -> None:
    with Ranks(never_comes, 2) as ranks:
        result = ranks.results(timedelta(seconds=60))[0].value
    assert result.error == "CollectiveTimeoutError", result
    assert "all_reduce #2 of group '0'" in result.text and "missing ranks [1]" in result.text


def dropped(rank: int) -> list[str]:
    messages: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("tpu_dist").addHandler(Listen())
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3 + rank, device="tpu"), group=group)
    dist.destroy_process_group(group)
    return messages


def test_a_failure_that_nobody_has_seen_is_logged_when_its_group_is_destroyed(
    pool2: RankPool,
) -> None:
    for messages in pool2(dropped):
        assert len(messages) == 1 and "called different collectives" in messages[0], messages


EXITS = """
import sys, time, torch, torch.distributed as dist
rank, store, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails"
dist.init_process_group("tpu_dist", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.ones(4, device="tpu")
dist.all_reduce(x)
x.tolist()
if rank == 1:
    time.sleep(2)  # rank 0 has nothing left to do meanwhile
    dist.all_reduce(torch.ones(5 if fails else 4, device="tpu"))
    torch.tpu.synchronize()
    print("done")
else:
    dist.all_reduce(x)
"""


@pytest.mark.parametrize("how", ["works", "fails"])
def test_what_was_waited_for_is_done_before_the_process_ends(tmp_path: Any, how: str) -> None:
    store = str(tmp_path / "store")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, str(rank), store, how],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    (_, first), (out, second) = (p.communicate(timeout=90) for p in processes)
    if how == "works":
        assert [p.returncode for p in processes] == [0, 0] and "done" in out, (first, second)
    else:
        assert "nobody has read" in first and "different collectives" in first, first
        assert "MismatchError" in second, second


# --- on a lane's own thread, and beside other calls


def callbacks(rank: int) -> tuple[list[float], list[float]]:
    x, y = torch.ones(4, device="tpu"), torch.ones(4, device="tpu")
    later: list[dist.Work] = []

    def halve(future: Any) -> Tensor:
        dist.all_reduce(y)  # runs at once, on this thread
        work = later[0]
        work.wait()
        z = work.result()[0] + y  # behind this one in the queue
        return future.value()[0].div_(2) + z

    dist.barrier()
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        mark("queued x")
    future = work.get_future()
    w = torch.ones(4, device="tpu")
    later.append(dist.all_reduce(w, async_op=True))
    chained = future.then(halve)
    return values(chained.wait()), values(x)


def test_callbacks_read_what_they_wait_for(pool2: RankPool) -> None:
    for result, x in pool2(callbacks):
        assert result == [5.0] * 4 and x == [1.0] * 4


def parts_of_one_storage(rank: int) -> list[float]:
    both = torch.full((2, 4), float(rank), device="tpu")
    peer = 1 - rank
    receive = dist.irecv(both[1], peer)  # before either has sent
    send = dist.isend(both[0], peer)
    assert receive is not None and send is not None
    send.wait()
    receive.wait()
    return values(both)


def test_a_part_of_a_storage_is_sent_while_another_is_received(pool2: RankPool) -> None:
    assert pool2(parts_of_one_storage) == [[0.0] * 4 + [1.0] * 4, [1.0] * 4 + [0.0] * 4]


def coalesced(rank: int) -> tuple[bool, list[float]]:
    dist.barrier()
    tensors = [torch.full((4,), float(rank + k), device="tpu") for k in range(3)]
    if rank == 1:
        wait_mark(0, "has waited for all")
    with dist._coalescing_manager(device=torch.device("tpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    done = all(work.is_completed() for work in manager.works)
    mark("has waited for all")
    return done, [tensor[0].item() for tensor in tensors]


def test_a_coalesced_call_orders_too(pool2: RankPool) -> None:
    (done, first), (_, second) = pool2(coalesced)
    assert not done and first == second == [1.0, 3.0, 5.0]


def functional_call(rank: int) -> list[float]:
    x = torch.full((4,), float(rank + 1), device="tpu")
    out = functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    gathered = functional.all_gather_tensor(out + 1, 0, dist.group.WORLD)
    return values(gathered * 1)


def test_functional_collectives(pool2: RankPool) -> None:
    assert pool2(functional_call) == [[4.0] * 8] * 2


def any_source(rank: int) -> tuple[int, list[float]]:
    if rank == 0:
        dist.send(torch.arange(4.0, device="tpu"), 1)
        return -1, []
    got = torch.zeros(4, device="tpu")
    return dist.recv(got), values(got)


def test_a_receive_from_any_source_says_whose_it_was(pool2: RankPool) -> None:
    assert pool2(any_source)[1] == (0, [0.0, 1.0, 2.0, 3.0])


def overlap(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4).to("tpu"), bucket_cap_mb=1)

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].div_(2))

    model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((2, 4), float(rank), device="tpu")).sum().backward()
    return values(next(model.parameters()).grad)  # type: ignore[arg-type]


def test_a_hook_of_ddp_reads_its_bucket_on_the_lane(pool2: RankPool) -> None:
    first, second = pool2(overlap)
    assert first == second == [1.0] * 16
