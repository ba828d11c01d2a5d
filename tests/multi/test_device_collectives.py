"""Collectives on tensors that live on the device: what they are on the CPU, and nothing else moves.

The oracle is the same call on CPU tensors in the same group, which test_verbs.py holds to torch.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch import Tensor
from torch.testing import assert_close

pytestmark = gloo_cannot("it has no tensors on 'tpu'")

SMALL, LARGE = 12, 3 * (1 << 18)


@lru_cache
def pool(size: int) -> RankPool:
    return RankPool(size)


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    yield
    for size in (2, 3):
        pool(size).close()


def source(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(size) * (rank + 2)) % 7).to(dtype)


def all_reduce(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    dist.all_reduce(x, dist.ReduceOp.MAX if x.dtype is torch.bool else dist.ReduceOp.SUM)
    return [x]


def strided_all_reduce(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    whole = torch.stack([x, x + x], dim=1)
    dist.all_reduce(whole[:, 1] if x.dtype is not torch.bool else whole[:, 1].contiguous())
    return [whole]


def broadcast(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    dist.broadcast(x, ranks - 1)
    return [x]


def reduce(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    dist.reduce(x, 1)
    return [x]


def all_gather(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    outputs = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(outputs, x)
    return outputs


def all_gather_single(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    output = torch.empty(ranks * x.numel(), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(output, x)
    return [output]


def reduce_scatter_single(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    output = torch.empty(x.numel() // ranks, dtype=x.dtype, device=x.device)
    dist.reduce_scatter_tensor(output, x, dist.ReduceOp.MAX)
    return [output]


def all_to_all_single(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    sends = [rank + other + 1 for other in range(ranks)]  # as many as the other sends here
    output = torch.empty(sum(sends), dtype=x.dtype, device=x.device)
    dist.all_to_all_single(output, x[: sum(sends)].contiguous(), sends, sends)
    return [output]


def gather_and_scatter(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    gathered = [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None
    dist.gather(x, gathered, dst=0)
    output = torch.empty_like(x)
    dist.scatter(output, gathered, src=0)
    return [output, *(gathered or [])]


def messages(x: Tensor, rank: int, ranks: int) -> list[Tensor]:
    got = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, got, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()
    return [got]


VERBS: list[Callable[[Tensor, int, int], list[Tensor]]] = [
    all_reduce, strided_all_reduce, broadcast, reduce, all_gather, all_gather_single,
    reduce_scatter_single, all_to_all_single, gather_and_scatter, messages,
]  # fmt: skip


def on_both(rank: int, name: str, size: int, dtype: torch.dtype) -> tuple[Any, Any, bool, Any]:
    verb = next(verb for verb in VERBS if verb.__name__ == name)
    ranks = dist.get_world_size()
    torch.tpu.reset_fallback_counts()
    theirs = verb(source(rank, size, dtype), rank, ranks)
    ours = verb(source(rank, size, dtype).to("tpu"), rank, ranks)
    there = all(tensor.device.type == "tpu" for tensor in ours)
    return [t.cpu() for t in ours], theirs, there, torch.tpu.fallback_counts()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("verb", [verb.__name__ for verb in VERBS])
def test_a_verb_does_what_it_does_on_the_cpu(verb: str, dtype: torch.dtype, size: int) -> None:
    if size == LARGE and dtype in (torch.int64, torch.bool):
        pytest.skip("the sizes differ in nothing that the dtype matters to")
    for ours, theirs, there, fallbacks in pool(2)(on_both, verb, size, dtype):
        assert there and not fallbacks
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("verb", ["all_reduce", "all_to_all_single", "reduce_scatter_single"])
def test_three_ranks(verb: str) -> None:
    for ours, theirs, there, _ in pool(3)(on_both, verb, 3 * SMALL, torch.float32):
        assert there
        assert_close(ours, theirs, rtol=0, atol=0)


def overwrite(rank: int, how: str) -> list[float]:
    x = torch.full((LARGE,), float(rank + 1), device="tpu")
    output = torch.empty(2 * LARGE, device="tpu")
    work = dist.all_gather_into_tensor(output, x, async_op=True)
    if how == "overwritten":
        x.fill_(100)
    elif how == "partly overwritten":
        x[: LARGE // 2].mul_(-1)
    else:
        x.untyped_storage().resize_(0)
    work.wait()
    return [output[0].item(), output[LARGE - 1].item(), output[LARGE].item(), output[-1].item()]


@pytest.mark.parametrize("how", ["overwritten", "partly overwritten", "freed"])
def test_what_was_passed_is_sent_whatever_becomes_of_the_tensor(how: str) -> None:
    assert pool(2)(overwrite, how) == [[1.0, 1.0, 2.0, 2.0]] * 2


def share_nothing(rank: int) -> list[float]:
    """A result must not be another tensor's array that is donated away under it."""
    x = torch.ones(LARGE, device="tpu")
    y = x.clone()
    dist.all_reduce(x)
    x.add_(1)
    y.mul_(5)
    dist.broadcast(y, 0)
    y.add_(1)
    return [x[0].item(), x[-1].item(), y[0].item(), y[-1].item()]


def test_results_are_the_tensors_own() -> None:
    assert pool(2)(share_nothing) == [[3.0, 3.0, 6.0, 6.0]] * 2


def make_and_drop(rank: int) -> list[int]:
    import gc

    def step() -> None:
        x = torch.ones(1 << 16, device="tpu")
        output = torch.empty(1 << 17, device="tpu")
        dist.all_gather_into_tensor(output, x)
        dist.all_reduce(x)

    seen = []
    for _ in range(3):
        for _ in range(20):
            step()
        gc.collect()
        end = time.monotonic() + 5  # a lane lets go of a call just after its waiter has gone on
        while torch.tpu.memory_allocated() >= 1 << 16 and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(torch.tpu.memory_allocated())
    return seen


def test_what_was_communicated_is_not_kept() -> None:
    for first, _, last in pool(2)(make_and_drop):
        assert last <= first


def mixed(rank: int) -> tuple[list[float], list[float], Any, list[Any]]:
    device, host = torch.ones(4, device="tpu"), torch.ones(4)
    works = [dist.all_reduce(t, async_op=True) for t in (device, host, device)]
    for work in works:
        work.wait()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank, "x": torch.ones(2, device="tpu") * rank})
    dist.barrier(device_ids=[torch.tpu.current_device()])
    got = [(o["rank"], o["x"].device.type, o["x"].tolist()) for o in objects]
    return device.tolist(), host.tolist(), dist.get_backend(), got


def test_tensors_of_both_kinds_share_a_group() -> None:
    for device, host, backend, objects in pool(2)(mixed):
        assert (device, host, backend) == ([4.0] * 4, [2.0] * 4, "tpu_dist")
        assert objects == [(0, "tpu", [0.0, 0.0]), (1, "tpu", [1.0, 1.0])]
