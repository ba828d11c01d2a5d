"""Links between several ends in this process, over real connections."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tpu_dist.errors import PeerLostError
from tpu_dist.runtime.channel import Channel
from tpu_dist.runtime.links import Links, Switchboard

SOON = 10.0


def never() -> None:
    pass


@contextmanager
def switchboards(count: int) -> Iterator[list[tuple[Channel, Switchboard]]]:
    with ExitStack() as stack:
        made = []
        for rank in range(count):
            channel = Channel(rank=rank, host="127.0.0.1", token="of this job")
            stack.callback(channel.close)
            made.append((channel, Switchboard(channel)))
            stack.callback(made[-1][1].close)
        addresses = [channel.address for channel, _ in made]
        for channel, _ in made:
            channel.resolve = addresses.__getitem__
            channel.serve()
        yield made


@contextmanager
def linked(ranks: Sequence[int]) -> Iterator[tuple[list[Links], ThreadPoolExecutor]]:
    """The links of `ranks`, by place, and a thread for each."""
    with switchboards(max(ranks) + 1) as made, ThreadPoolExecutor(len(ranks)) as pool:
        opening = [pool.submit(made[rank][1].open, ranks, "set", never) for rank in ranks]
        links = [future.result(SOON) for future in opening]
        try:
            yield links, pool
        finally:
            for end in links:
                end.cut()
                end.close()


def gather(
    links: Sequence[Links], blocks: Sequence[bytes], pool: ThreadPoolExecutor
) -> list[Future[list[bytes]]]:
    return [pool.submit(end.all_gather, block) for end, block in zip(links, blocks, strict=True)]


@pytest.mark.parametrize("ranks", [(0, 1), (2, 0, 1), (0, 1, 2, 3), (4, 2, 0, 1, 3), range(8)])
def test_everybody_gets_everybodys_block_by_place(ranks: Sequence[int]) -> None:
    with linked(ranks) as (links, pool):
        for turn in range(20):
            blocks = [os.urandom(place * turn * 7 % 300) for place in range(len(ranks))]
            for gathered in gather(links, blocks, pool):
                assert gathered.result(SOON) == blocks


def test_blocks_larger_than_the_connections_hold_cross() -> None:
    with linked((0, 1, 2)) as (links, pool):
        blocks = [os.urandom(1 << 20) * 24, b"", os.urandom(1 << 20) * 9]
        for gathered in gather(links, blocks, pool):
            assert gathered.result(SOON) == blocks


def test_one_may_be_ahead_of_the_others() -> None:
    with linked((0, 1, 2)) as (links, pool):
        first = links[0]
        ahead = pool.submit(lambda: [first.all_gather(bytes([turn])) for turn in range(50)])
        time.sleep(0.05)
        rest = [
            pool.submit(lambda end=end: [end.all_gather(b"") for _ in range(50)])
            for end in links[1:]
        ]
        wanted = [[bytes([turn]), b"", b""] for turn in range(50)]
        assert [future.result(SOON) for future in (ahead, *rest)] == [wanted] * 3


def test_sets_and_names_have_links_of_their_own() -> None:
    with switchboards(2) as made, ThreadPoolExecutor(4) as pool:
        opened = {
            (name, place): pool.submit(made[rank][1].open, ranks, name, never)
            for name, ranks in (("up", (0, 1)), ("down", (1, 0)))
            for place, rank in enumerate(ranks)
        }
        ends = {key: future.result(SOON) for key, future in opened.items()}
        said = {key: pool.submit(end.all_gather, repr(key).encode()) for key, end in ends.items()}
        for name in ("up", "down"):
            for place in (0, 1):
                wanted = [repr((name, other)).encode() for other in (0, 1)]
                assert said[name, place].result(SOON) == wanted
        for end in ends.values():
            end.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_cut_ends_the_wait_on_both_ends(who: int) -> None:
    with linked((0, 1)) as (links, pool):
        waiting = pool.submit(links[0].all_gather, b"x")
        time.sleep(0.05)
        assert not waiting.done()
        links[who].cut()
        assert isinstance(waiting.exception(SOON), OSError)


def test_a_cut_ends_a_send_that_is_stuck() -> None:
    with linked((0, 1)) as (links, pool):
        sending = pool.submit(links[0].all_gather, bytes(64 << 20))
        time.sleep(0.1)
        assert not sending.done()
        links[1].cut()
        assert isinstance(sending.exception(SOON), OSError)


def test_waiting_for_a_peer_that_does_not_come_can_be_given_up() -> None:
    started = time.monotonic()

    def give_up() -> None:
        if time.monotonic() - started > 0.1:
            raise TimeoutError("nobody comes")

    with switchboards(2) as made:
        files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TimeoutError, match="nobody comes"):
            made[0][1].open((0, 1), "set", give_up)
        made[1][1].close()  # what has come for nobody
        assert len(os.listdir("/proc/self/fd")) == files


def test_a_peer_that_ends_while_it_is_waited_for_is_named() -> None:
    with switchboards(3) as made, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(made[0][1].open, (0, 1, 2), "set", never)
        time.sleep(0.1)
        assert not opening.done()
        made[2][0].close()  # who passes on to it has heard of its link
        made[2][1].close()
        with pytest.raises(PeerLostError, match="rank 2 is gone"):
            opening.result(SOON)


def test_a_peer_that_has_ended_is_named() -> None:
    with switchboards(2) as made:
        made[1][0].close()
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            made[0][1].open((0, 1), "set", never)


def test_a_stranger_cannot_open_a_link() -> None:
    with switchboards(2) as made:
        stranger = Channel(rank=1, host="127.0.0.1", token="guessed")
        stranger.resolve = {0: made[0][0].address}.__getitem__
        with stranger.open_link(0, "set/1") as sock:
            sock.settimeout(SOON)
            assert sock.recv(1) == b""
        stranger.close()


def test_links_leave_no_open_file_and_no_thread() -> None:
    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def live() -> None:
        with linked((0, 1, 2)) as (links, pool):
            for gathered in gather(links, [b"a", b"b", b"c"], pool):
                gathered.result(SOON)

    live()
    before = resources()
    for _ in range(3):
        live()
    assert resources() == before
