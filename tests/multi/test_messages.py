"""Sends and receives: matching, order, sizes on both sides of the eager limit, and rings."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failures import attempt
from ranks import RankPool, gloo_cannot, mark, wait_mark
from torch import Tensor

pytestmark = gloo_cannot("some of this blocks it for ever, or ends its process")

EAGER = (256 << 10) // 4
"""Elements of float32 that travel in the offer itself."""
LARGE = 300_000
HUGE = (9 << 20) // 4 + 3
SIZES = [0, 1, EAGER, EAGER + 1, LARGE]


def stamped(sender: int, receiver: int, numel: int, tag: int = 0) -> Tensor:
    """A message that tells where it belongs."""
    return torch.full((numel,), float(1000 * sender + 100 * receiver + tag))


def ping_pong(rank: int, numel: int) -> None:
    peer = 1 - rank
    received = torch.empty(numel)
    for tag in range(3):
        if rank == 0:
            dist.send(stamped(0, 1, numel, tag), dst=1, tag=tag)
            dist.recv(received, src=1, tag=tag)
        else:
            assert dist.recv(received, src=0, tag=tag) == 0
            dist.send(stamped(1, 0, numel, tag), dst=0, tag=tag)
        assert received.equal(stamped(peer, rank, numel, tag))


@pytest.mark.parametrize("numel", [*SIZES, HUGE])
def test_a_message_of_any_size_arrives(pool2: RankPool, numel: int) -> None:
    pool2(ping_pong, numel)


DTYPES = [torch.float64, torch.bfloat16, torch.bool, torch.uint16, torch.complex64, torch.int8]


def of_every_dtype(rank: int) -> None:
    for numel in (5, 80_000):
        for dtype in DTYPES:
            message = (torch.arange(numel) % 2).to(dtype)
            if rank == 0:
                dist.send(message, dst=1)
            else:
                received = torch.zeros(numel, dtype=dtype)
                dist.recv(received, src=0)
                assert received.view(torch.uint8).equal(message.view(torch.uint8))


def test_a_message_of_any_dtype_arrives(pool2: RankPool) -> None:
    pool2(of_every_dtype)


def strided(rank: int) -> None:
    for rows in (4, 40_000):
        source = torch.arange(rows * 6.0).view(rows, 6)
        if rank == 0:
            dist.send(source.t(), dst=1)
            dist.send(source[::2, ::3], dst=1)
            dist.send(torch.tensor(3.5), dst=1)
            dist.send(torch.ones(1).expand(rows), dst=1)
        else:
            received = torch.empty(rows, 6)
            dist.recv(received.t(), src=0)
            assert received.equal(source)
            holes = torch.zeros(rows, 6)
            dist.recv(holes[::2, ::3], src=0)
            assert holes[::2, ::3].equal(source[::2, ::3])
            assert holes.count_nonzero() == source[::2, ::3].count_nonzero()
            scalar = torch.tensor(0.0)
            dist.recv(scalar, src=0)
            assert scalar.item() == 3.5
            ones = torch.zeros(rows)
            dist.recv(ones, src=0)
            assert ones.eq(1).all()


def test_views_are_sent_and_filled(pool2: RankPool) -> None:
    pool2(strided)


def tags_out_of_order(rank: int, numel: int) -> None:
    tags = [5, 1, 4, 2, 3]
    if rank == 0:
        works = [dist.isend(stamped(0, 1, numel, tag), dst=1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
        return
    for tag in sorted(tags):
        received = torch.empty(numel)
        dist.recv(received, src=0, tag=tag)
        assert received.equal(stamped(0, 1, numel, tag))


@pytest.mark.parametrize("numel", [3, LARGE])
def test_tags_may_be_received_in_another_order(pool2: RankPool, numel: int) -> None:
    pool2(tags_out_of_order, numel)


def same_tag_in_order(rank: int) -> None:
    """Small and large messages with one tag, posted before and after they are sent."""
    sizes = [3, LARGE, 5, EAGER, EAGER + 1, 1, LARGE + 1, 0, 7]
    if rank == 0:
        early = [dist.isend(stamped(0, 1, n, k), dst=1) for k, n in enumerate(sizes)]
        wait_mark(1, "posted")
        late = [dist.isend(stamped(0, 1, n, k), dst=1) for k, n in enumerate(sizes)]
        for work in early + late:
            work.wait()
        return
    tensors = [torch.empty(n) for n in sizes * 2]
    works = [dist.irecv(tensor, src=0) for tensor in tensors]
    mark("posted")
    for work in works:
        work.wait()
    for k, tensor in enumerate(tensors):
        assert tensor.equal(stamped(0, 1, sizes[k % len(sizes)], k % len(sizes)))


def test_messages_of_one_tag_arrive_in_the_order_they_were_sent(pool2: RankPool) -> None:
    pool2(same_tag_in_order)


def from_anybody(rank: int, numel: int) -> None:
    if rank == 0:
        sources = []
        for _ in range(6):
            received = torch.empty(numel)
            source = dist.recv(received)
            assert received.equal(stamped(source, 0, numel))
            sources.append(source)
        assert sorted(sources) == [1, 1, 2, 2, 3, 3]
        work = dist.irecv(torch.empty(numel))
        mark("posted")
        work.wait()
        assert work._source_rank() == 2
    else:
        for _ in range(2):
            dist.send(stamped(rank, 0, numel), dst=0)
        wait_mark(0, "posted")
        if rank == 2:
            dist.send(stamped(2, 0, numel), dst=0)
    dist.barrier()


@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_receive_from_anybody_says_who_it_was(pool4: RankPool, numel: int) -> None:
    pool4(from_anybody, numel)


def anybody_of_a_group(rank: int) -> None:
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        dist.send(torch.zeros(2), dst=3)
        return
    if rank < 3:
        dist.send(torch.full((2,), float(rank)), group_dst=2, group=group)
        return
    seen = set()
    for _ in range(2):
        received = torch.empty(2)
        source = dist.recv(received, group=group)
        seen.add(source)
        assert received.eq(source).all()
    assert seen == {1, 2}
    assert dist.recv(torch.empty(2), src=0) == 0


def test_messages_of_groups_are_kept_apart(pool4: RankPool) -> None:
    pool4(anybody_of_a_group)


def ring(rank: int, size: int, numel: int, send_first: bool) -> None:
    """Unbatched: each rank starts its send and its receive one by one, and then waits."""
    group = dist.new_group(list(range(size)))
    if rank >= size:
        return
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    for round_ in range(3):
        sent, received = stamped(rank, ahead, numel, round_), torch.empty(numel)

        def send(tensor: Tensor = sent) -> Any:
            return dist.isend(tensor, dst=ahead, group=group)

        def receive(tensor: Tensor = received) -> Any:
            return dist.irecv(tensor, src=behind, group=group)

        works = [send(), receive()] if send_first else [receive(), send()]
        for work in works:
            work.wait()
        assert received.equal(stamped(behind, rank, numel, round_))
        assert sent.equal(stamped(rank, ahead, numel, round_))


@pytest.mark.parametrize("send_first", [True, False])
@pytest.mark.parametrize("numel", [3, LARGE])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_without_batching_does_not_wait_for_itself(
    pool4: RankPool, size: int, numel: int, send_first: bool
) -> None:
    pool4(ring, size, numel, send_first)


def in_both_directions(rank: int) -> None:
    """Many at once on one pair, in both directions, without any order between the ranks."""
    if rank > 1:
        return
    peer = 1 - rank
    tensors = [torch.empty(LARGE) for _ in range(6)]
    works = []
    for k in range(6):
        sends = dist.isend(stamped(rank, peer, LARGE, k), dst=peer, tag=k)
        receives = dist.irecv(tensors[k if rank else 5 - k], src=peer, tag=k if rank else 5 - k)
        works += [sends, receives]
    for work in works:
        work.wait()
    for k, tensor in enumerate(tensors):
        assert tensor.equal(stamped(peer, rank, LARGE, k))


def test_large_messages_cross_in_both_directions(pool4: RankPool) -> None:
    pool4(in_both_directions)


def all_pairs(rank: int, numel: int) -> None:
    others = [other for other in range(4) if other != rank]
    received = {other: torch.empty(numel) for other in others}
    operations = []
    for other in others if rank % 2 else reversed(others):
        operations.append(dist.P2POp(dist.irecv, received[other], other, tag=7))
        operations.append(dist.P2POp(dist.isend, stamped(rank, other, numel), other, tag=7))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for other in others:
        assert received[other].equal(stamped(other, rank, numel))


@pytest.mark.parametrize("numel", SIZES)
def test_a_batch_between_all_pairs(pool4: RankPool, numel: int) -> None:
    for _ in range(3):
        pool4(all_pairs, numel)


def beside_collectives(rank: int) -> None:
    """Messages and collectives do not wait for each other."""
    peer = rank ^ 1
    received = torch.empty(LARGE)
    receives = dist.irecv(received, src=peer)
    for _ in range(3):
        total = torch.ones(LARGE)
        dist.all_reduce(total)
        assert total.eq(4).all()
    dist.isend(stamped(rank, peer, LARGE), dst=peer)
    dist.barrier()
    receives.wait()
    assert received.equal(stamped(peer, rank, LARGE))


def test_collectives_go_on_while_a_message_waits(pool4: RankPool) -> None:
    pool4(beside_collectives)


def by_threads(rank: int) -> None:
    """Each of four threads talks to its own counterpart, by its tag."""
    if rank > 1:
        return
    errors: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for _ in range(5):
                ping_pong_with_tag(rank, 2000 * tag * tag, tag)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert not errors, errors


def ping_pong_with_tag(rank: int, numel: int, tag: int) -> None:
    received = torch.empty(numel)
    steps: list[Callable[[], Any]] = [
        lambda: dist.send(stamped(rank, 1 - rank, numel, tag), dst=1 - rank, tag=tag),
        lambda: dist.recv(received, src=1 - rank, tag=tag),
    ]
    for step in steps if rank == 0 else reversed(steps):
        step()
    assert received.equal(stamped(1 - rank, rank, numel, tag))


def test_threads_may_send_and_receive(pool4: RankPool) -> None:
    pool4(by_threads)


def mismatched(rank: int, numel: int) -> None:
    """A message that does not fit is refused on both ends; the next ones pass."""
    cases: list[tuple[Tensor, Tensor, str]] = [
        (torch.ones(numel), torch.empty(numel + 1), f"room for {numel + 1} elements of float32"),
        (torch.ones(numel + 1), torch.empty(numel), f"room for {numel} elements of float32"),
        (torch.ones(numel), torch.empty(numel, dtype=torch.int32), f"{numel} elements of int32"),
        (torch.ones(numel).half(), torch.empty(numel).bfloat16(), "elements of bfloat16"),
    ]
    for message, room, said in cases:
        before = room.clone()
        if rank == 0:
            result = attempt(lambda m=message: dist.send(m, dst=1))
            assert "was refused by rank 1" in result.text, result
        else:
            result = attempt(lambda r=room: dist.recv(r, src=0))
            assert room.view(torch.uint8).equal(before.view(torch.uint8))
        assert result.error == "MismatchError" and said in result.text, result
        dtype = str(message.dtype).removeprefix("torch.")
        assert f"a message of {message.numel()} elements of {dtype} from rank 0" in result.text
        ping_pong(rank, numel)


@pytest.mark.parametrize("numel", [3, LARGE])
def test_a_message_that_does_not_fit_is_refused_on_both_ends(pool2: RankPool, numel: int) -> None:
    pool2(mismatched, numel)


def nonsense(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for call in (
        lambda: group.send([torch.ones(1)], 2, 0),
        lambda: group.recv([torch.ones(1)], -1, 0),
        lambda: dist.send(torch.ones(1), rank),
        lambda: group.recv([torch.empty(1, device="meta")], 1 - rank, 0),
    ):
        assert attempt(call).error == "ValueError", call


def test_messages_to_nobody_or_blocking_ones_to_oneself_are_refused(pool2: RankPool) -> None:
    pool2(nonsense)


def to_oneself(rank: int, device: str) -> None:
    """isend and irecv, unlike send, take this rank for a peer: either may come first."""
    for numel in (0, 3, EAGER, LARGE):
        sent = [stamped(rank, rank, numel, tag).to(device) for tag in (1, 2)]
        received = [torch.zeros(numel, device=device) for _ in sent]
        first = dist.isend(sent[0], rank, tag=1)
        second = dist.irecv(received[1], rank, tag=2)
        assert first is not None and second is not None
        assert not first.is_completed() and not second.is_completed()
        works = [first, second, dist.irecv(received[0], rank, tag=1)]
        works.append(dist.isend(sent[1], rank, tag=2))
        for work in works:
            assert work is not None
            work.wait()
        for before, after in zip(sent, received, strict=True):
            assert after.equal(before)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_message_to_oneself_arrives(pool2: RankPool, device: str) -> None:
    pool2(to_oneself, device)


def batch_with_oneself(rank: int) -> None:
    size = dist.get_world_size()
    received = [torch.zeros(LARGE) for _ in range(size)]
    calls = []
    for peer in range(size):
        calls.append(dist.P2POp(dist.irecv, received[peer], peer))
        calls.append(dist.P2POp(dist.isend, stamped(rank, peer, LARGE), peer))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    for peer in range(size):
        assert received[peer].equal(stamped(peer, rank, LARGE))


def test_a_batch_may_name_every_rank(pool4: RankPool) -> None:
    pool4(batch_with_oneself)


def wrong_to_oneself(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    small = group.send([torch.ones(3)], rank, 5)
    with pytest.raises(RuntimeError, match="Send and receive the same"):
        group.recv([torch.zeros(4)], rank, 5).wait()
    with pytest.raises(RuntimeError, match="was refused by rank"):
        small.wait()
    lonely = attempt(lambda: group.send([torch.ones(LARGE)], rank, 6).wait(timedelta(seconds=0.3)))
    assert lonely.error == "CollectiveTimeoutError"
    found = torch.zeros(LARGE)
    receive = group.recv_anysource([found], 6)  # the message itself is still under way
    receive.wait()
    assert receive._source_rank() == rank
    assert found.eq(1).all()


def test_a_message_to_oneself_fails_as_any_other(pool2: RankPool) -> None:
    pool2(wrong_to_oneself)


def unmodified_when_reused(rank: int) -> None:
    """A sender may change its tensor as soon as wait() returns."""
    for numel in (3, EAGER, LARGE):
        if rank == 0:
            tensor = torch.ones(numel)
            work = dist.isend(tensor, dst=1)
            work.wait()
            tensor.fill_(7)
        else:
            received = torch.empty(numel)
            dist.recv(received, src=0)
            assert received.eq(1).all()


def test_a_sent_tensor_is_free_after_wait(pool2: RankPool) -> None:
    pool2(unmodified_when_reused)
