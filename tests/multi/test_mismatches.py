"""Ranks that call different things: every rank is told who called what, and the group lives on."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import Attempt, attempt
from ranks import RankPool, Ranks, gloo_cannot

pytestmark = gloo_cannot("it hangs, crashes or sums apples and pears")

LARGE = 300_000
ReduceOp = dist.ReduceOp

Call = Callable[[], Any]

# The call of each rank, for payloads of about n elements, and what the error says. Of three ranks
# the last is the odd one, which calls another.
CASES: dict[str, tuple[Callable[[bool, int], Any], list[str]]] = {
    "shape": (lambda odd, n: dist.all_reduce(torch.ones(n + odd)), ["all_reduce SUM float32"]),
    "order of dims": (
        lambda odd, n: dist.all_reduce(torch.ones((2, n) if odd else (n, 2))),
        ["(2, ", ", 2)"],
    ),
    "0-d against one element": (
        lambda odd, n: dist.all_reduce(torch.ones(() if odd else 1)),
        [" ()", " (1,)"],
    ),
    "small against large": (
        lambda odd, n: dist.all_reduce(torch.ones(3 if odd else n + 4)),
        ["(3,)"],
    ),
    "dtype": (
        lambda odd, n: dist.all_reduce(torch.ones(n, dtype=torch.int32 if odd else torch.float32)),
        ["int32", "float32"],
    ),
    "dtypes of one width": (
        lambda odd, n: dist.all_reduce(torch.ones(n).to(torch.float16 if odd else torch.bfloat16)),
        ["bfloat16", "float16"],
    ),
    "op": (
        lambda odd, n: dist.all_reduce(torch.ones(n), ReduceOp.MAX if odd else ReduceOp.SUM),
        ["MAX", "SUM"],
    ),
    "factor": (
        lambda odd, n: _reduce_with(dist._make_nccl_premul_sum(0.5 if odd else 0.25), n),
        ["factor 0.5", "factor 0.25"],
    ),
    "root": (lambda odd, n: dist.broadcast(torch.ones(n), int(odd)), ["root 0", "root 1"]),
    "broadcast shape": (lambda odd, n: dist.broadcast(torch.ones(n + odd), 0), ["broadcast"]),
    "verb": (
        lambda odd, n: dist.broadcast(torch.ones(n), 0) if odd else dist.all_reduce(torch.ones(n)),
        ["broadcast float32", "all_reduce SUM float32"],
    ),
    "barrier against data": (
        lambda odd, n: dist.barrier() if odd else dist.all_reduce(torch.ones(n)),
        ["barrier", "all_reduce"],
    ),
    "all_gather sizes": (
        lambda odd, n: dist.all_gather_single(torch.empty(3 * (n + odd)), torch.ones(n + odd)),
        ["sends", "expects"],
    ),
    "all_gather dtype": (
        lambda odd, n: dist.all_gather_single(
            torch.empty(3 * n).to(torch.int32 if odd else torch.float32),
            torch.ones(n).to(torch.int32 if odd else torch.float32),
        ),
        ["int32", "float32"],
    ),
    "reduce_scatter sizes": (
        lambda odd, n: dist.reduce_scatter_single(torch.empty(n + odd), torch.ones(3 * (n + odd))),
        ["sends", "expects"],
    ),
    "split sizes": (
        lambda odd, n: dist.all_to_all_single(
            torch.empty(3 * n), torch.ones(3 * n), [n] * 3, [n + 1, n, n - 1] if odd else [n] * 3
        ),
        ["sends", "expects"],
    ),
    "expected sizes": (
        lambda odd, n: dist.all_to_all(
            [torch.empty(n + (odd and k == 0)) for k in range(3)], [torch.ones(n)] * 3
        ),
        ["sends", "expects"],
    ),
    "coalesced count": (
        lambda odd, n: _coalesced(2 if odd else 1, n),
        ["all_reduce SUM float32"],
    ),
    "gather against scatter": (
        lambda odd, n: (
            dist.scatter(torch.empty(n), None, src=0)
            if odd
            else dist.gather(torch.ones(n), _room(n), dst=0)
        ),
        ["gather", "scatter"],
    ),
}


def _reduce_with(op: Any, n: int) -> None:
    dist.all_reduce(torch.ones(n), op)


def _room(n: int) -> list[torch.Tensor] | None:
    return [torch.empty(n) for _ in range(3)] if dist.get_rank() == 0 else None


def _coalesced(count: int, n: int) -> None:
    with dist._coalescing_manager():
        for k in range(count):
            dist.all_reduce(torch.ones(n + count + k))


def call_case(rank: int, name: str, n: int) -> tuple[Attempt, Attempt]:
    case, _ = CASES[name]
    result = attempt(lambda: case(rank == 2, n))
    after = attempt(still_works)
    return result, after


def still_works() -> None:
    for numel in (3, LARGE):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        assert tensor.eq(dist.get_world_size()).all()
    dist.barrier()


@pytest.fixture(scope="module")
def pool3() -> Any:
    with RankPool(3) as pool:
        yield pool


@pytest.mark.parametrize("n", [3, LARGE])
@pytest.mark.parametrize("name", CASES)
def test_a_disagreement_is_told_on_every_rank_and_the_group_goes_on(
    pool3: RankPool, name: str, n: int
) -> None:
    said = CASES[name][1]
    for result, after in pool3(call_case, name, n):
        assert result.error == "MismatchError", result
        assert "rank 2" in result.text or "rank 0 sends" in result.text, result
        assert all(words in result.text for words in said), result
        assert "nothing was sent" in result.text
        assert after.ok, after


def untouched(rank: int) -> None:
    """After a mismatch the tensors are what they were."""
    tensor = torch.full((LARGE,), float(rank))
    op = ReduceOp.MAX if rank else ReduceOp.SUM
    assert attempt(lambda: dist.all_reduce(tensor, op)).error == "MismatchError"
    assert tensor.eq(rank).all()


def test_nothing_is_written_by_a_call_that_was_refused(pool3: RankPool) -> None:
    pool3(untouched)


def three_opinions(rank: int) -> Attempt:
    calls: list[Call] = [
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.broadcast(torch.ones(5).int(), 1),
        lambda: dist.barrier(),
    ]
    return attempt(calls[rank])


def test_every_opinion_is_named_with_its_rank(pool3: RankPool) -> None:
    for result in pool3(three_opinions):
        for words in (
            "rank 0 called all_reduce SUM float32 (4,)",
            "rank 1 called broadcast int32 (5,) root 1",
            "rank 2 called barrier",
        ):
            assert words in result.text, result


def global_ranks(rank: int) -> Attempt | None:
    """In a sub-group the ranks of the job are named, not those of the group."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    return attempt(lambda: dist.all_reduce(torch.ones(3 + rank), group=group))


def test_the_ranks_of_the_job_are_named(pool3: RankPool) -> None:
    first, _, second = pool3(global_ranks)
    for result in (first, second):
        assert "rank 0 called all_reduce SUM float32 (3,)" in result.text
        assert "rank 2 called all_reduce SUM float32 (5,)" in result.text


def many_refused(rank: int) -> list[str]:
    """Calls in flight behind a refused one are not harmed."""
    tensors = [torch.ones(4 + (rank if k % 3 == 0 else 0)) for k in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    errors = [attempt(work.wait).error for work in works]
    for k, tensor in enumerate(tensors):
        assert tensor.eq(1 if k % 3 == 0 else 3).all()
    return errors


def test_calls_behind_a_refused_one_are_not_harmed(pool3: RankPool) -> None:
    for errors in pool3(many_refused):
        assert errors == ["MismatchError" if k % 3 == 0 else "" for k in range(30)]


def sparse_shapes(rank: int) -> tuple[Attempt, Attempt]:
    size = 9 if rank == 2 else 6
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), torch.ones(2), (size,))
    return attempt(lambda: dist.all_reduce(tensor)), attempt(still_works)


def sparse_against_dense(rank: int) -> tuple[Attempt, Attempt]:
    tensor = torch.eye(3).to_sparse() if rank == 2 else torch.ones(3, 3)
    return attempt(lambda: dist.all_reduce(tensor)), attempt(still_works)


@pytest.mark.parametrize("call", [sparse_shapes, sparse_against_dense])
def test_sparse_tensors_that_do_not_agree_are_refused(pool3: RankPool, call: Any) -> None:
    for result, after in pool3(call):
        assert result.error == "MismatchError", result
        assert "rank 2" in result.text, result
        assert after.ok, after


def one_rank_alone_errs(rank: int) -> tuple[Attempt, Attempt]:
    """A mistake that one rank sees by itself, before it has sent anything: it may call again."""
    result = Attempt("", "", 0.0)
    if rank == 2:
        result = attempt(lambda: dist.all_reduce(torch.empty(3, device="meta")))
        assert result.error == "ValueError"
        coalesced = [torch.ones(3), torch.empty(3, device="meta")]
        group = dist.group.WORLD
        assert group is not None
        again = attempt(lambda: group.allreduce_coalesced(coalesced))
        assert again.error == "ValueError"
    return result, attempt(still_works)


def test_a_mistake_refused_on_one_rank_alone_leaves_it_in_step(pool3: RankPool) -> None:
    for _, after in pool3(one_rank_alone_errs):
        assert after.ok, after


def test_debug_detail_changes_nothing() -> None:
    with Ranks(call_case, 3, args=("dtype", 3), env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as ranks:
        for outcome in ranks.results(timedelta(seconds=60)):
            assert outcome.ok, outcome.traceback
            result, after = outcome.value
            assert result.error == "MismatchError" and "rank 2 called" in result.text
            assert after.ok, after
        assert set(ranks.finish(timedelta(seconds=30))) == {"exited with code 0"}
