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
from failures import Attempt, attempt
from ranks import RankPool, gloo_cannot
from torch import Tensor
from torch.testing import assert_close

from tpu_dist.runtime.device.box import box_of

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


class Watched:
    """Looks at what goes into programs and comes out of them."""

    def __init__(self) -> None:
        world: Any = dist.group.WORLD
        self.programs = world._lane.programs
        self.taken: list[Any] = []
        self.given: list[Any] = []
        self.sizes: list[int] = []

    def __enter__(self) -> "Watched":
        get = self.programs.get

        def watched(form: Any, **options: Any) -> Any:
            program = get(form, **options)

            def run(operands: Any) -> Any:
                outputs = program(operands)
                self.taken += operands
                self.given += outputs
                self.sizes.append(options["size"])
                return outputs

            return run

        self.programs.get = watched
        return self

    def __exit__(self, *_: object) -> None:
        del self.programs.get


def is_array_of(array: Any, tensor: Tensor) -> bool:
    torch.tpu.synchronize()
    return box_of(tensor).array is array


def passes_through(rank: int, verb: str, shape: list[int], dtype: torch.dtype) -> Any:
    """The array that was the tensor's is the program's operand, and its output the tensor's."""
    for turn in range(3):
        x = (torch.arange(torch.Size(shape).numel()) % 5 + rank).to(dtype).reshape(shape).to("tpu")
        before = box_of(x).array
        with Watched() as watched:
            if verb == "broadcast":
                dist.broadcast(x, 0)
            else:
                dist.all_reduce(x)
            torch.tpu.synchronize()
        if turn:  # from the second time on
            assert watched.sizes == [x.numel()]
            assert watched.taken[0] is before
            assert is_array_of(watched.given[0], x) or (verb == "broadcast" and rank == 0)
        assert (verb == "broadcast" and rank == 0) or not box_of(x).shared
    return x.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [[1111], [3, 5, 7], [1 << 20], [129, 1]])
@pytest.mark.parametrize("verb", ["all_reduce", "broadcast"])
def test_the_tensors_array_is_the_programs(verb: str, shape: list[int], dtype: torch.dtype) -> None:
    if shape == [1 << 20] and dtype is not torch.float32:
        pytest.skip("the sizes differ in nothing that the dtype matters to")
    base = torch.arange(torch.Size(shape).numel()) % 5
    parts = [(base + rank).to(dtype).reshape(shape) for rank in range(2)]
    wanted = parts[0] if verb == "broadcast" else parts[0] + parts[1]
    for got in pool(2)(passes_through, verb, shape, dtype):
        assert_close(got, wanted, rtol=0, atol=0)


def gather_as_it_is(rank: int) -> tuple[bool, list[int], list[int]]:
    for _ in range(3):
        x = torch.full((1111,), float(rank), device="tpu")
        output = torch.empty(2222, device="tpu")
        shard = torch.empty(777, device="tpu")
        with Watched() as gather:
            dist.all_gather_single(output, x)
            torch.tpu.synchronize()
        with Watched() as scatter:
            dist.reduce_scatter_single(shard, torch.ones(1554, device="tpu"))
            torch.tpu.synchronize()
    assert output.tolist() == [0.0] * 1111 + [1.0] * 1111 and shard.tolist() == [2.0] * 777
    return gather.taken[0] is box_of(x).array, gather.sizes, scatter.sizes


def test_sizes_that_come_again_are_not_padded() -> None:
    assert pool(2)(gather_as_it_is) == [(True, [1111], [777])] * 2


def ever_other(rank: int) -> int:
    world: Any = dist.group.WORLD
    before = len(world._lane.programs._cache)
    for size in range(5000, 5100):
        dist.all_reduce(torch.ones(size, device="tpu"))
    torch.tpu.synchronize()
    return len(world._lane.programs._cache) - before


def test_sizes_that_do_not_come_again_share_programs() -> None:
    assert all(compiled <= 2 for compiled in pool(2)(ever_other))


def mix_between_ranks(rank: int, verb: str, size: int) -> tuple[Attempt, list[float]]:
    call = next(call for call in VERBS if call.__name__ == verb)
    x = source(rank, size, torch.float32).to("tpu" if rank == 0 else "cpu")

    def run() -> None:
        call(x, rank, 2)
        torch.tpu.synchronize()

    result = attempt(run)
    again = torch.ones(2, device="tpu")
    dist.all_reduce(again)
    return result, again.tolist()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("verb", ["all_reduce", "broadcast", "all_gather", "all_to_all_single"])
def test_ranks_that_mix_devices_are_told_who_has_what(verb: str, size: int) -> None:
    for result, again in pool(2)(mix_between_ranks, verb, size):
        assert result.error == "MismatchError", result
        assert f"rank 0 called {verb.removesuffix('_single')}" in result.text
        assert "with tensors on 'tpu'" in result.text and "with tensors on 'cpu'" in result.text
        assert again == [2.0, 2.0]


def mix_in_one_call(rank: int) -> list[Attempt]:
    host, device = torch.ones(4), torch.ones(4, device="tpu")
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather([host, device], device),
        lambda: dist.all_gather_single(torch.empty(8), device),
        lambda: dist.reduce_scatter_single(torch.empty(2, device="tpu"), host),
        lambda: dist.all_to_all_single(host, device),
    ]
    return [attempt(call) for call in calls]


def test_one_call_takes_tensors_of_one_device() -> None:
    for attempts in pool(2)(mix_in_one_call):
        for result in attempts:
            assert result.error == "ValueError" and "cpu" in result.text and "tpu:0" in result.text


def mixed_message(rank: int, size: int) -> list[float]:
    x = torch.full((size,), 1.0 + rank, device="tpu" if rank == 0 else "cpu")
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        got = torch.zeros(size)
        dist.recv(got, 0)
        dist.send(x, 0)
        x = got
    return [x[0].item(), x[-1].item()]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_message_may_go_from_a_device_to_a_host(size: int) -> None:
    assert pool(2)(mixed_message, size) == [[2.0, 2.0], [1.0, 1.0]]


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
