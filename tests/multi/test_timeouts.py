"""A rank that never comes: every waiting rank gets an error that names it, and lives on."""

import dataclasses
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from failures import LARGE, Attempt, all_reduce, assert_clean_exit, attempt, await_end
from ranks import Ranks, gloo_cannot, mark, wait_mark
from torch._C._distributed_c10d import AllreduceOptions

pytestmark = gloo_cannot("its errors do not say who is missing")

TIMEOUT = timedelta(seconds=1)
LATE = 3.0  # seconds by which an error may come after the timeout
LIMIT = timedelta(seconds=TIMEOUT.total_seconds() + LATE)


def assert_timed_out(
    result: Attempt,
    verb: str,
    number: int,
    missing: list[int],
    *,
    group: str = "'0'",
    timeout: timedelta = TIMEOUT,
) -> None:
    seconds = timeout.total_seconds()
    assert result.error == "CollectiveTimeoutError", result
    assert f"{verb} #{number} of group {group}" in result.text
    assert f"missing ranks {missing}" in result.text
    assert f"{seconds:g} s" in result.text
    assert seconds - 0.2 <= result.seconds < seconds + LATE, result


def set_timeout() -> None:
    """In a rank: shortens the timeout; starting up may take longer."""
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(TIMEOUT)


def wait_for_everybody_else(rank: int, absent: list[int]) -> None:
    """On absent ranks: stay alive, until those who wait for us have given up."""
    for other in range(dist.get_world_size()):
        if other not in absent:
            wait_mark(other, "gave up")


def call_without(rank: int, absent: list[int], verb: str, numel: int, warm: bool) -> Attempt | None:
    if warm:
        all_reduce()
        all_reduce(numel=numel)
    set_timeout()
    if rank in absent:
        wait_for_everybody_else(rank, absent)
        return None
    if verb == "barrier":
        result = attempt(dist.barrier)
    elif verb == "async all_reduce":
        work = dist.all_reduce(torch.ones(numel), async_op=True)
        result = await_end(work, LIMIT)
    else:
        result = attempt(lambda: all_reduce(numel=numel))
    mark("gave up")
    return result


@pytest.mark.parametrize(
    ("world_size", "absent", "verb", "numel", "warm"),
    [
        (2, [1], "all_reduce", 3, False),
        (2, [0], "async all_reduce", LARGE, True),
        (3, [0], "all_reduce", 3, True),
        (3, [1], "barrier", 0, False),
        (4, [2], "all_reduce", LARGE, True),
        (4, [1, 3], "barrier", 0, False),
    ],
)
def test_ranks_that_never_come_are_named_on_every_waiting_rank(
    world_size: int, absent: list[int], verb: str, numel: int, warm: bool
) -> None:
    args = (absent, verb, numel, warm)
    with Ranks(call_without, world_size, args=args) as ranks:
        for outcome in ranks.results(timedelta(seconds=40)):
            if outcome.rank in absent:
                assert outcome.ok, outcome
            else:
                assert outcome.ok, outcome.traceback
                number = 3 if warm else 1
                assert_timed_out(outcome.value, verb.split()[-1], number, absent)
        assert_clean_exit(ranks, list(range(world_size)))


def every_verb_behind(rank: int) -> list[Attempt]:
    """Many calls are under way when the first one turns out to be hopeless."""
    if rank == 1:
        wait_mark(0, "gave up")
        return []
    set_timeout()
    started = time.monotonic()
    works = [dist.all_reduce(torch.ones(numel), async_op=True) for numel in [3, LARGE] * 50]
    works.append(dist.barrier(async_op=True))
    first = await_end(works[0], LIMIT)
    results = [dataclasses.replace(first, seconds=time.monotonic() - started)]
    results += [attempt(work.wait) for work in works[1:]]
    results.append(attempt(all_reduce))
    mark("gave up")
    return results


def test_calls_queued_behind_a_hopeless_one_fail_with_it() -> None:
    with Ranks(every_verb_behind, 2) as ranks:
        first, *others, later = ranks.results(timedelta(seconds=40))[0].value
        assert_timed_out(first, "all_reduce", 1, [1])
        assert len(others) == 100
        assert {other.error for other in others} <= {"CollectiveTimeoutError", "CollectiveError"}
        assert sum(other.seconds for other in others) < LATE
        assert later.error == "CollectiveError" and "given up earlier" in later.text
        assert later.seconds < 1
        assert_clean_exit(ranks, [0, 1])


def three_timeouts(rank: int) -> list[Attempt]:
    """Rank 0 alone calls, on three groups whose timeouts are set in three ways."""
    second = timedelta(seconds=1)
    of_group = dist.new_group([0, 1], timeout=second)
    set_later = dist.new_group([0, 2], timeout=timedelta(seconds=60))
    if rank:
        wait_mark(0, "gave up")
        return []
    world = dist.group.WORLD
    assert world is not None
    results = [attempt(lambda: all_reduce(of_group))]
    set_later.set_timeout(second)
    results.append(attempt(lambda: all_reduce(set_later)))
    options = AllreduceOptions()
    options.timeout = second
    results.append(attempt(lambda: world.allreduce([torch.ones(3)], options).wait()))
    mark("gave up")
    return results


def test_a_timeout_may_be_a_groups_or_a_calls_own() -> None:
    second = timedelta(seconds=1)
    with Ranks(three_timeouts, 3, timeout=timedelta(seconds=60)) as ranks:
        results = ranks.results(timedelta(seconds=40))[0].value
        assert_timed_out(results[0], "all_reduce", 1, [1], group="'1'", timeout=second)
        assert_timed_out(results[1], "all_reduce", 1, [2], group="'2'", timeout=second)
        assert_timed_out(results[2], "all_reduce", 1, [1, 2], group="'0'", timeout=second)
        assert_clean_exit(ranks, [0, 1, 2])


def messages(rank: int) -> list[Attempt]:
    if rank == 1:
        wait_mark(0, "gave up")
        return []
    set_timeout()
    works = [
        dist.irecv(torch.empty(3), src=1),
        dist.irecv(torch.empty(3)),
        dist.isend(torch.ones(3), dst=1),
        dist.isend(torch.ones(LARGE), dst=1, tag=7),
        dist.irecv(torch.empty(LARGE), src=1, tag=9),
    ]
    results = [await_end(work, LIMIT) for work in works]
    results += [attempt(lambda: dist.recv(torch.empty(2), src=1, tag=2))]
    mark("gave up")
    return results


def test_messages_without_a_match_time_out_and_leave_the_group_whole() -> None:
    with Ranks(messages, 2) as ranks:
        results = ranks.results(timedelta(seconds=40))[0].value
        unmatched = "nobody has sent a message that matches"
        unwanted = "its receiver lives, but has posted no receive that matches"
        wanted = [
            ("recv of group '0' (from rank 1, tag 0)", unmatched),
            ("recvAnySource of group '0' (from any rank, tag 0)", unmatched),
            ("send of group '0' (to rank 1, tag 0)", unwanted),
            ("send of group '0' (to rank 1, tag 7)", unwanted),
            ("recv of group '0' (from rank 1, tag 9)", unmatched),
            ("recv of group '0' (from rank 1, tag 2)", unmatched),
        ]
        for result, words in zip(results, wanted, strict=True):
            assert result.error == "CollectiveTimeoutError", result
            assert all(part in result.text for part in words), result
            assert result.seconds < LIMIT.total_seconds()
        ranks.submit(still_works)
        assert all(outcome.ok for outcome in ranks.results(timedelta(seconds=30)))
        assert_clean_exit(ranks, [0, 1])


def still_works(rank: int) -> None:
    all_reduce()
    dist.barrier()


def sent_with_another_tag(rank: int) -> Attempt | None:
    if rank == 0:
        for numel, tag in ((5, 3), (2, 4)):
            dist.isend(torch.ones(numel), dst=1, tag=tag)
        mark("sent")
        wait_mark(1, "gave up")
        return None
    set_timeout()
    wait_mark(0, "sent")
    result = attempt(lambda: dist.recv(torch.empty(5), src=0, tag=1))
    mark("gave up")
    return result


def test_a_receive_that_times_out_says_which_messages_wait() -> None:
    with Ranks(sent_with_another_tag, 2) as ranks:
        result = ranks.results(timedelta(seconds=40))[1].value
        assert result.error == "CollectiveTimeoutError"
        for words in ("5 elements of float32 with tag 3 from rank 0", "2 elements", "tag 4"):
            assert words in result.text
        assert_clean_exit(ranks, [0, 1])  # with messages that nobody has received


def impatient(rank: int) -> list[Attempt]:
    if rank == 1:
        wait_mark(0, "impatient")
        all_reduce()
        return []
    group = dist.group.WORLD
    assert group is not None
    for nonsense in (timedelta(0), timedelta(seconds=-1)):
        assert attempt(lambda t=nonsense: group.set_timeout(t)).error == "ValueError"
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    first = attempt(lambda: work.wait(timedelta(seconds=0.3)))
    again = attempt(lambda: work.wait(timedelta(milliseconds=1)))
    assert not work.is_completed()
    mark("impatient")
    last = attempt(lambda: work.wait(timedelta(seconds=20)))
    assert tensor.eq(2).all()
    return [first, again, last]


def test_a_wait_that_gives_up_names_who_is_missing_and_the_call_goes_on() -> None:
    with Ranks(impatient, 2) as ranks:
        outcome = ranks.results(timedelta(seconds=40))[0]
        first, again, last = outcome.value
        for result in (first, again):
            assert result.error == "CollectiveTimeoutError"
            assert "all_reduce #1 of group '0'" in result.text and "missing" not in result.error
            assert "missing ranks [1]" in result.text
        assert 0.25 <= first.seconds < 0.3 + LATE
        assert last.ok
        assert_clean_exit(ranks, [0, 1])


def barriers(rank: int, absent: list[int]) -> list[Attempt]:
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier(timedelta(seconds=20))
    results = []
    for all_of_them in (True, False):
        if rank in absent:
            for other in range(4):
                if other not in absent:
                    wait_mark(other, f"gave up {all_of_them}")
        results.append(attempt(lambda a=all_of_them: group.monitored_barrier(TIMEOUT, a)))
        mark(f"gave up {all_of_them}")
    return results


def test_a_monitored_barrier_names_who_is_missing_and_leaves_the_group_whole() -> None:
    with Ranks(barriers, 4, args=([1, 3],)) as ranks:
        for outcome in ranks.results(timedelta(seconds=40)):
            assert outcome.ok, outcome.traceback
            for result, named in zip(outcome.value, ("ranks 1, 3", "ranks 1 "), strict=True):
                assert result.error == "CollectiveTimeoutError", result
                assert named in result.text
                on_time = outcome.rank in (0, 2)  # the others hear at once that they are late
                assert result.seconds < (LIMIT.total_seconds() if on_time else 1.0)
        ranks.submit(still_works)
        assert all(outcome.ok for outcome in ranks.results(timedelta(seconds=30)))
        assert_clean_exit(ranks, [0, 1, 2, 3])
