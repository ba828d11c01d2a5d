"""Sub-groups: who is in them, that they do not disturb each other, and their names and ends."""

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot, run_ranks

pytestmark = gloo_cannot("a group's store, names and order are its own")

LARGE = 300_000
"""Elements of float32 that go by a program."""


def world() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check(group: dist.ProcessGroup, ranks: list[int], numel: int = 3) -> None:
    """In a member: an all_reduce in which each rank has a weight of its own."""
    tensor = torch.full((numel,), float(10 ** ranks.index(dist.get_rank())))
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(sum(10**k for k in range(len(ranks)))).all(), tensor


def in_every_subset(rank: int, numel: int) -> None:
    subsets = [list(c) for size in (1, 2, 3, 4) for c in combinations(range(4), size)]
    groups = [(dist.new_group(ranks), ranks) for ranks in subsets]
    for group, ranks in groups:
        if rank in ranks:
            check(group, ranks, numel)
            assert dist.get_group_rank(group, rank) == ranks.index(rank)
            assert dist.get_process_group_ranks(group) == ranks
            root = torch.full((numel,), float(rank))
            dist.broadcast(root, src=ranks[-1], group=group)
            assert root.eq(ranks[-1]).all()


@pytest.mark.parametrize("numel", [3, 5000])
def test_every_subset_of_ranks_is_a_group(pool4: RankPool, numel: int) -> None:
    pool4(in_every_subset, numel)


def all_groups_at_once(rank: int) -> None:
    """Each rank starts its groups' collectives in its own order; sets wait for no other set."""
    subsets = [list(c) for size in (2, 3, 4) for c in combinations(range(4), size)]
    groups = [dist.new_group(ranks) for ranks in subsets]
    order = [k for k, ranks in enumerate(subsets) if rank in ranks]
    for attempt in range(3):
        random.Random(attempt * 4 + rank).shuffle(order)
        tensors = {k: torch.full((LARGE,), float(rank + 1)) for k in order}
        works = [dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in order]
        for work in works:
            assert work.wait(timedelta(seconds=50))
        for k in order:
            assert tensors[k].eq(sum(other + 1 for other in subsets[k])).all()


def test_groups_of_different_ranks_may_be_called_in_any_order(pool4: RankPool) -> None:
    pool4(all_groups_at_once)


def same_members_three_times(rank: int, numel: int) -> None:
    groups = [dist.new_group([0, 1, 3]) for _ in range(3)]
    if rank == 2:
        return
    tensors = [torch.full((numel,), float(k)) for k in range(3)]
    works = [
        dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)
    ]
    for k, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert tensor.eq(3 * k).all()
    names = {group.group_name for group in groups}
    assert len(names) == 3


@pytest.mark.parametrize("numel", [3, LARGE])
def test_groups_with_the_same_members_are_told_apart(pool4: RankPool, numel: int) -> None:
    pool4(same_members_three_times, numel)


def other_order(rank: int, numel: int) -> None:
    first, second = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    order = [(first, 1.0), (second, 10.0)]
    tensors = [torch.full((numel,), value) for _, value in order]
    places = [0, 1] if rank % 2 else [1, 0]
    works = [dist.all_reduce(tensors[k], group=order[k][0], async_op=True) for k in places]
    for work in works:
        work.wait()
    assert tensors[0].eq(4).all() and tensors[1].eq(40).all()


@pytest.mark.parametrize("numel", [3, LARGE])
def test_groups_with_the_same_members_may_be_called_in_any_order(
    pool4: RankPool, numel: int
) -> None:
    pool4(other_order, numel)


def twenty_in_opposite_order(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(20)]
    tensors = [torch.full((3 if k % 4 else 5000,), float(k)) for k in range(20)]
    order = range(20) if rank % 2 else range(19, -1, -1)
    works = [dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in order]
    for work in works:
        work.wait()
    assert all(tensor.eq(4 * k).all() for k, tensor in enumerate(tensors))


def test_many_groups_with_the_same_members_may_wait_in_any_order(pool4: RankPool) -> None:
    pool4(twenty_in_opposite_order)


def threads_with_groups(rank: int) -> None:
    """A thread a group, each at its own pace, as data loaders and checkpoints have them."""
    groups = [dist.new_group([0, 1, 2, 3]) for _ in range(4)]
    errors: list[BaseException] = []

    def work(group: dist.ProcessGroup, seed: int) -> None:
        try:
            pause = random.Random(seed * 4 + rank)
            for step in range(15):
                tensor = torch.full((3 if step % 3 else 5000,), float(seed))
                dist.all_reduce(tensor, group=group)
                assert tensor.eq(4 * seed).all()
                threading.Event().wait(pause.random() * 0.004)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(g, k)) for k, g in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert not errors, errors


def test_threads_may_each_have_a_group_of_the_same_members(pool4: RankPool) -> None:
    pool4(threads_with_groups)


def split(rank: int) -> None:
    halves = world().split_group([0, 2] if rank in (0, 2) else [1, 3])
    ranks = [0, 2] if rank in (0, 2) else [1, 3]
    check(halves, ranks)
    assert halves.get_ranks() == ranks and (halves.rank(), halves.size()) == (ranks.index(rank), 2)
    backwards = world().split_group([3, 2, 1, 0])
    assert backwards.rank() == 3 - rank
    outputs = torch.empty(4)
    backwards.all_gather_single(outputs, torch.tensor(float(rank)), None).wait()
    assert outputs.tolist() == [3.0, 2.0, 1.0, 0.0]
    large = torch.full((LARGE,), float(rank))
    backwards.broadcast([large], _root(0)).wait()
    assert large.eq(3).all()
    assert (world().split_group([1, 2]) is None) == (rank in (0, 3))
    if rank in (0, 2):
        nested = halves.split_group([1, 0])
        assert nested.get_ranks() == [2, 0]
        check(nested, [2, 0])
    for nonsense in ([], [0, 0], [4], [-1]):
        with pytest.raises(ValueError, match="split_group"):
            world().split_group(nonsense)
    # Not a rank has waited for another so far; those that are not in a group go on without it.
    timed = world().split_group([0, 1, 2, 3], timeout=timedelta(seconds=7), group_name="mine")
    assert timed.group_name == "mine" and timed.options.timeout == timedelta(seconds=7)
    check(timed, [0, 1, 2, 3])


def _root(rank: int) -> Any:
    from torch._C._distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = rank
    return options


def test_a_group_is_split_without_a_handshake(pool4: RankPool) -> None:
    pool4(split)


def unsorted(rank: int) -> None:
    """A group in descending order; its members exchange large messages at the same time."""
    group = dist.new_group([1, 0], sort_ranks=False)
    if rank > 1:
        return
    peer = 1 - rank
    for _ in range(5):
        sent, received = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
        total = torch.full((LARGE,), 1.0)
        if rank == 0:
            works = [dist.isend(sent, peer), dist.irecv(received, peer)]
            works.append(dist.all_reduce(total, group=group, async_op=True))
        else:
            works = [dist.all_reduce(total, group=group, async_op=True)]
            works += [dist.irecv(received, peer), dist.isend(sent, peer)]
        for work in works:
            work.wait()
        assert received.eq(peer).all() and total.eq(2).all()
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    assert [t.item() for t in gathered] == [1.0, 0.0]


def test_messages_do_not_meet_the_collectives_of_a_group_in_another_order(
    pool4: RankPool,
) -> None:
    pool4(unsorted)


def subgroups(rank: int) -> None:
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    check(mine, [rank // 2 * 2, rank // 2 * 2 + 1])
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    check(mine, [0, 3] if rank in (0, 3) else [1, 2])
    timed = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=9), group_desc="tensor parallel")
    assert timed.options.timeout == timedelta(seconds=9)
    assert timed.group_desc == "tensor parallel"
    check(timed, [0, 1, 2, 3])


def test_torchs_ways_to_make_groups_work(pool4: RankPool) -> None:
    pool4(subgroups)


def locally(rank: int) -> None:
    if rank != 1:
        group = dist.new_group([0, 2], use_local_synchronization=True)
        check(group, [0, 2])
    check(world(), [0, 1, 2])


def test_members_alone_may_make_a_group() -> None:
    """In fresh processes: torch names such a group by how many each rank has had."""
    run_ranks(locally, 3)


def outside(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank > 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        return
    with pytest.raises(ValueError, match="not part of group"):
        dist.broadcast(torch.ones(1), src=3, group=group)
    for root in (2, -1):
        with pytest.raises(ValueError, match=f"the root is {root}, outside of .* 0 to 1"):
            group.broadcast([torch.ones(1)], _root(root))
    check(group, [0, 1])


def test_ranks_outside_of_a_group_have_nothing_to_do_with_it(pool4: RankPool) -> None:
    pool4(outside)


def ended(rank: int) -> None:
    group = dist.new_group([0, 1, 2, 3])
    check(group, [0, 1, 2, 3])
    dist.destroy_process_group(group)
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.barrier(),
        lambda: group.send([torch.ones(1)], (rank + 1) % 4, 0),
        lambda: group.recv_anysource([torch.ones(1)], 0),
        lambda: group.monitored_barrier(),
        lambda: group.split_group([0, 1, 2, 3]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"process group '\d+' was destroyed; make another"):
            call()
    with pytest.raises(ValueError, match="[Ii]nvalid process group"):
        dist.destroy_process_group(group)
    again = dist.new_group([0, 1, 2, 3])
    check(again, [0, 1, 2, 3])
    check(world(), [0, 1, 2, 3])


def test_a_destroyed_group_refuses_calls_and_the_others_go_on(pool4: RankPool) -> None:
    pool4(ended)


def what_torch_asks(rank: int) -> None:
    group = world()
    assert dist.get_backend(group) == "tpu_dist" == group.name() == group.getBackendName()
    assert group._get_backend(torch.device("cpu")) is group
    assert group.get_group_store() is not None
    before = group._get_sequence_number_for_group()
    check(group, [0, 1, 2, 3])
    assert group._get_sequence_number_for_group() == before + 1
    times = group.verb_times()["all_reduce"]
    assert times.calls >= 1 and times.seconds > 0
    with pytest.raises(RuntimeError, match="merge_remote_group"):
        group.merge_remote_group(None)


def test_a_group_answers_what_torch_asks_of_a_backend(pool4: RankPool) -> None:
    pool4(what_torch_asks)
