"""Work: waiting, futures and their callbacks, errors, and lives that end early."""

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import attempt
from ranks import RankPool, Ranks, gloo_cannot, mark, wait_mark
from torch import Tensor

pytestmark = gloo_cannot("its works answer other questions")

LARGE = 300_000


def all_reduced(value: float, numel: int = 3) -> Tensor:
    tensor = torch.full((numel,), value)
    dist.all_reduce(tensor)
    return tensor


def life_of_a_work(rank: int) -> None:
    tensor = torch.full((LARGE,), 1.0)
    if rank == 1:
        wait_mark(0, "looked")
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        assert not work.is_completed() and not work.is_success()
        assert work.exception() is None
        future = work.get_future()
        assert not future.done()
        mark("looked")
    assert work.wait() is True
    assert work.wait(timedelta(seconds=1)) is True
    work.synchronize()
    assert work.is_completed() and work.is_success() and work.exception() is None
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr() and tensor.eq(2).all()
    assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future() is work.get_future()


def test_a_work_tells_what_has_become_of_its_call(pool2: RankPool) -> None:
    pool2(life_of_a_work)


def results_of_each_verb(rank: int) -> None:
    """result() holds the outputs, in the verbs' own order."""
    x = torch.ones(2)
    outputs = [torch.empty(2), torch.empty(2)]
    work = dist.all_gather(outputs, x, async_op=True)
    work.wait()
    assert [t.data_ptr() for t in work.result()] == [t.data_ptr() for t in outputs]
    share = torch.empty(1)
    work = dist.reduce_scatter_single(share, x, async_op=True)
    work.wait()
    assert work.result()[0].data_ptr() == share.data_ptr()
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.result() == []


def test_a_result_is_the_outputs(pool2: RankPool) -> None:
    pool2(results_of_each_verb)


def many_in_flight(rank: int) -> None:
    tensors = [torch.full((1 + k % 7 * 700,), float(k)) for k in range(400)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    assert all(work.is_completed() for work in works)  # one queue: the last is done last
    for k, tensor in enumerate(tensors):
        assert tensor.eq(2 * k).all()


def test_hundreds_of_calls_may_be_under_way(pool2: RankPool) -> None:
    pool2(many_in_flight)


def chained(rank: int, late: bool) -> None:
    """A collective in the callback of another, for each of many that are under way."""
    firsts = [torch.full((100,), float(k)) for k in range(40)]
    seconds = [torch.full((100,), 1000.0 + k) for k in range(40)]
    chains = []
    for first, second in zip(firsts, seconds, strict=True):
        work = dist.all_reduce(first, async_op=True)
        if late and rank == 1:
            work.wait()  # its future is fulfilled already when the callback comes

        def and_then(future: Any, tensor: Tensor = second) -> list[Tensor]:
            dist.all_reduce(tensor)
            return [future.value()[0], tensor]

        chains.append(work.get_future().then(and_then))
    for k, chain in enumerate(chains):
        first, second = chain.wait()
        assert first.eq(2 * k).all() and second.eq(2 * (1000 + k)).all(), (k, first[0], second[0])


@pytest.mark.parametrize("late", [False, True])
def test_callbacks_may_call_collectives(pool2: RankPool, late: bool) -> None:
    pool2(chained, late)


def nested(rank: int) -> None:
    """Callbacks of callbacks, as in PowerSGD's hook: each starts the next without waiting."""

    def first(value: float) -> Any:
        tensor = torch.full((50,), value)
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda f: second(f.value()[0]))

    def second(tensor: Tensor) -> Any:
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda f: f.value()[0].sum())

    inner = [first(float(k)).wait() for k in range(10)]
    for k, future in enumerate(inner):
        assert future.wait().item() == 4 * 50 * k


def test_callbacks_of_callbacks(pool2: RankPool) -> None:
    pool2(nested)


def waits_for_another(rank: int) -> None:
    """A callback that waits for a call that was made before it ran."""
    first, second = torch.ones(100), torch.full((LARGE,), 5.0)
    work = dist.all_reduce(first, async_op=True)
    future = work.get_future()
    later = dist.all_reduce(second, async_op=True)

    def and_then(_: Any) -> float:
        later.wait()
        return float(second[0])

    assert future.then(and_then).wait() == 10.0
    third, fourth = torch.ones(10), torch.ones(10)
    futures = [dist.all_reduce(t, async_op=True).get_future() for t in (third, fourth)]
    assert futures[0].then(lambda _: futures[1].wait()[0].sum()).wait().item() == 20.0


def test_a_callback_may_wait_for_a_call_that_is_under_way(pool2: RankPool) -> None:
    pool2(waits_for_another)


def on_another_group(rank: int) -> None:
    """Callbacks of one group's calls call another group, with other members."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    chains = []
    for k in range(20):
        tensor, partial = torch.full((10,), float(k)), torch.full((5000,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)

        def and_then(_: Any, mine: Tensor = partial) -> Tensor:
            dist.all_reduce(mine, group=pair)
            return mine

        chains.append(work.get_future().then(and_then))
    wanted = 1.0 if rank < 2 else 5.0
    for chain in chains:
        assert chain.wait().eq(wanted).all()


def test_callbacks_may_call_another_group(pool4: RankPool) -> None:
    pool4(on_another_group)


def callbacks_of_messages(rank: int) -> None:
    peer = 1 - rank
    received = torch.empty(100)
    done = dist.irecv(received, src=peer).get_future().then(lambda f: f.value()[0].sum())
    dist.isend(torch.full((100,), float(rank)), dst=peer).wait()
    assert done.wait().item() == 100 * peer
    collected = torch.futures.collect_all(
        [dist.all_reduce(torch.ones(k + 1), async_op=True).get_future() for k in range(5)]
    )
    assert [f.wait()[0][0].item() for f in collected.wait()] == [2.0] * 5


def test_messages_have_futures_too(pool2: RankPool) -> None:
    pool2(callbacks_of_messages)


def failing_callback(rank: int) -> None:
    def fail(_: Any) -> None:
        raise LookupError("in the callback")

    chain = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(fail)
    assert "in the callback" in attempt(chain.wait).text
    assert all_reduced(1.0).eq(2).all()


def test_a_callback_that_fails_harms_nothing_else(pool2: RankPool) -> None:
    pool2(failing_callback)


def errors_of_a_work(rank: int) -> None:
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    future = work.get_future()
    seen: list[str] = []
    chain = future.then(lambda f: seen.append(attempt(f.value).error))
    for _ in range(2):
        result = attempt(work.wait)
        assert result.error == "MismatchError", result
    assert work.is_completed() and not work.is_success()
    assert type(work.exception()).__name__ == "MismatchError"
    result = attempt(future.wait)
    assert result.error and "different collectives" in result.text, result
    chain.wait()
    assert seen and seen[0]
    late = work.get_future()
    assert "different collectives" in attempt(late.wait).text
    assert all_reduced(1.0).eq(2).all()


def test_a_failed_call_is_an_error_of_its_work_and_its_future(pool2: RankPool) -> None:
    pool2(errors_of_a_work)


def waited_for_by_many(rank: int) -> None:
    if rank == 1:
        wait_mark(0, "all wait")
    tensor = torch.ones(LARGE)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        seen: list[bool] = []
        threads = [threading.Thread(target=lambda: seen.append(work.wait())) for _ in range(5)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        mark("all wait")
        for thread in threads:
            thread.join(30)
        assert seen == [True] * 5
    work.wait()


def test_a_work_may_be_waited_for_by_many_threads(pool2: RankPool) -> None:
    pool2(waited_for_by_many)


def dropped(rank: int) -> None:
    """Works whose Python half nobody holds, and tensors that nobody else holds."""
    tensor = torch.ones(LARGE)
    for _ in range(20):
        dist.all_reduce(tensor, async_op=True)
        tensor.data = tensor.clone()
    dist.all_reduce(torch.ones(LARGE), async_op=True)
    gc.collect()
    assert all_reduced(3.0).eq(6).all()
    held = torch.ops._c10d_functional.all_reduce(torch.ones(LARGE), "sum", "0")
    gc.collect()
    for _ in range(1500):  # more than are kept for C++'s sake
        dist.barrier(async_op=True)
    dist.barrier()
    gc.collect()
    assert torch.ops._c10d_functional.wait_tensor(held).eq(2).all()


def test_a_work_that_only_cpp_holds_is_waited_for(pool2: RankPool) -> None:
    pool2(dropped)


def free_after(rank: int) -> None:
    """What a call held is let go, once it is done and its works are forgotten."""
    tensor = torch.ones(LARGE)
    watch = weakref.ref(tensor)
    dist.all_reduce(tensor)
    del tensor
    for _ in range(1100):
        dist.barrier(async_op=True)
    dist.barrier()
    gc.collect()
    assert watch() is None


def test_tensors_are_let_go_after_their_call(pool2: RankPool) -> None:
    pool2(free_after)


def aborted(rank: int) -> tuple[Any, Any, Any]:
    group = dist.new_group([0, 1, 2])
    other = dist.new_group([0, 2])
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 1:
        wait_mark(0, "freed")
        wait_mark(2, "freed")
        return None, None, None
    if rank == 0:
        threading.Timer(0.3, group.abort).start()
    blocked = attempt(lambda: dist.all_reduce(torch.ones(LARGE), group=group))
    mark("freed")
    later = attempt(lambda: dist.all_reduce(torch.ones(3), group=group))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=other)
    assert tensor.eq(2).all()
    return blocked, later, attempt(group.abort)


def test_an_abort_on_another_thread_frees_every_blocked_rank() -> None:
    with Ranks(aborted, 3) as ranks:
        outcomes = ranks.results(timedelta(seconds=40))
        for outcome in outcomes:
            assert outcome.ok, outcome.traceback
        for rank in (0, 2):
            blocked, later, again = outcomes[rank].value
            assert blocked.error == "CollectiveError" and "group '1' was aborted" in blocked.text
            assert blocked.seconds < 3
            assert later.error == "CollectiveError" and later.seconds < 1
            assert again.ok
        assert set(ranks.finish(timedelta(seconds=30))) == {"exited with code 0"}


def coalesced_failure(rank: int) -> None:
    """The first error of several calls is the error of them all."""
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        group = dist.group.WORLD
        assert group is not None
        group.allreduce([torch.ones(3)])
        group.allreduce([torch.ones(3 + rank)])
        group.allreduce([torch.ones(3)])
    assert attempt(manager.wait).error == "MismatchError"
    assert all_reduced(1.0).eq(2).all()


def test_coalesced_calls_fail_with_the_first_error(pool2: RankPool) -> None:
    pool2(coalesced_failure)


def coalescing_left_open(rank: int) -> None:
    """An error inside a coalescing block must not leave the group coalescing for ever."""
    group = dist.group.WORLD
    assert group is not None
    for _ in range(2):
        group._start_coalescing(torch.device("cpu"))
        work = group.allreduce([torch.ones(3)])
        group._end_coalescing(torch.device("cpu")).wait()
        assert work.is_success()
    empty = group._start_coalescing(torch.device("cpu"))
    assert empty is None
    assert group._end_coalescing(torch.device("cpu")).wait()


def test_coalescing_may_be_started_and_ended_again(pool2: RankPool) -> None:
    pool2(coalescing_left_open)
