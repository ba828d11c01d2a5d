"""The channel between processes: several ends in this one, over real connections."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from tpu_dist.errors import PeerLostError
from tpu_dist.runtime.channel import Channel

SOON = 5.0  # seconds that anything here may take on a busy machine
TOKEN = "of this job"


def connect(*channels: Channel) -> None:
    """Let them find each other; ranks are their places."""
    addresses = {channel.rank: channel.address for channel in channels}
    for channel in channels:
        channel.resolve = addresses.__getitem__
        channel.serve()


@contextmanager
def channels(count: int) -> Iterator[list[Channel]]:
    with ExitStack() as stack:
        made = [Channel(rank=rank, host="127.0.0.1", token=TOKEN) for rank in range(count)]
        for channel in made:
            stack.callback(channel.close)
        connect(*made)
        yield made


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, f"not within {SOON} s: {what}"
        time.sleep(0.002)


class Inbox:
    """Collects what comes in for one kind of message."""

    def __init__(self, channel: Channel, kind: str = "note") -> None:
        self.taken: list[tuple[int, Mapping[str, Any], bytes]] = []
        channel.on(kind, self._take)

    def _take(self, rank: int, meta: dict[str, Any], body: bytes) -> None:
        self.taken.append((rank, meta, body))

    def wait_for(self, count: int) -> list[tuple[int, Mapping[str, Any], bytes]]:
        eventually(lambda: len(self.taken) >= count, f"{count} messages, have {len(self.taken)}")
        return self.taken


def ask_who(channel: Channel, rank: int) -> Any:
    return channel.ask(rank, "who", {}).result(timeout=SOON)["name"]


def test_a_message_arrives_with_its_sender_and_all_it_holds() -> None:
    with channels(2) as (first, second):
        inbox = Inbox(second)
        meta = {"text": "ünï\ncode", "list": [1, None, 2.5], "nested": {"a": True}}
        first.send(1, "note", meta, b"\0body\xff")
        assert inbox.wait_for(1) == [(0, meta, b"\0body\xff")]


def test_what_is_said_before_a_channel_serves_waits_for_it() -> None:
    with ExitStack() as stack:
        made = [Channel(rank=rank, host="127.0.0.1", token=TOKEN) for rank in range(2)]
        for channel in made:
            stack.callback(channel.close)
        first, second = made
        first.serve()
        first.resolve = {1: second.address}.__getitem__
        second.resolve = {0: first.address}.__getitem__
        first.send(1, "note", {"n": 1})
        answer = first.ask(1, "who", {})
        with first.open_link(1, "link") as link:
            link.sendall(b"early")
            time.sleep(0.1)  # the handlers come late
            inbox, links = Inbox(second), []
            second.on("who", lambda rank, meta, body: {"name": "second"})
            second.on_link(lambda *arrived: links.append(arrived))
            second.serve()
            inbox.wait_for(1)
            assert answer.result(SOON) == {"name": "second", "request": 0}
            eventually(lambda: bool(links), "the link arrives")
            rank, name, sock, received = links[0]
            with sock:
                assert (rank, name) == (0, "link")
                assert (received or sock.recv(5)) == b"early"


def test_messages_arrive_in_the_order_they_were_sent() -> None:
    with channels(2) as (first, second):
        inbox = Inbox(second)
        for number in range(2000):
            first.send(1, "note", {"n": number}, bytes(number % 7) * (number % 501))
        assert [meta["n"] for _, meta, _ in inbox.wait_for(2000)] == list(range(2000))


def test_threads_that_send_at_once_keep_each_its_own_order() -> None:
    with channels(3) as (first, second, third):
        inbox = Inbox(third)

        def talk(channel: Channel, thread: int) -> None:
            for number in range(200):
                channel.send(2, "note", {"who": [channel.rank, thread], "n": number}, b"x" * 999)

        with ThreadPoolExecutor(8) as pool:
            done = [pool.submit(talk, c, k) for c in (first, second) for k in range(4)]
            for future in done:
                future.result(timeout=SOON)
        seen: dict[tuple[int, ...], list[int]] = {}
        for rank, meta, _ in inbox.wait_for(1600):
            assert rank == meta["who"][0]
            seen.setdefault(tuple(meta["who"]), []).append(meta["n"])
        assert list(seen.values()) == [list(range(200))] * 8


def test_large_bodies_cross_in_both_directions_at_once() -> None:
    body = os.urandom(1 << 20) * 24
    with channels(2) as (first, second):
        inboxes = [Inbox(first), Inbox(second)]
        started = time.monotonic()
        first.send(1, "note", {}, body)
        second.send(0, "note", {}, body)
        for inbox in inboxes:
            assert inbox.wait_for(1)[0][2] == body
        assert time.monotonic() - started < SOON


def test_sending_does_not_wait_for_a_receiver_that_is_busy() -> None:
    with channels(2) as (first, second):
        release = threading.Event()
        second.on("stall", lambda rank, meta, body: release.wait(SOON) and None)
        inbox = Inbox(second)
        first.send(1, "stall", {})
        started = time.monotonic()
        for number in range(50):
            first.send(1, "note", {"n": number}, b"x" * (1 << 18))
        assert time.monotonic() - started < 1
        assert not inbox.taken
        release.set()
        assert [meta["n"] for _, meta, _ in inbox.wait_for(50)] == list(range(50))


def test_a_question_is_answered_by_what_the_handler_returns() -> None:
    with channels(3) as ends:
        for end in ends:
            end.on("who", lambda rank, meta, body, own=end.rank: {"name": f"{own} to {rank}"})
        assert ask_who(ends[0], 1) == "1 to 0"
        assert ask_who(ends[1], 0) == "0 to 1"
        assert ask_who(ends[0], 2) == "2 to 0"


def test_many_questions_at_once_get_each_their_own_answer() -> None:
    with channels(2) as (first, second):
        second.on("double", lambda rank, meta, body: {"twice": 2 * meta["n"]})
        answers = [first.ask(1, "double", {"n": number}) for number in range(500)]
        assert [a.result(timeout=SOON)["twice"] for a in answers] == list(range(0, 1000, 2))


def test_a_question_to_a_peer_that_ends_before_it_answers_fails() -> None:
    with channels(2) as (first, second):
        asked = threading.Event()
        second.on("who", lambda rank, meta, body: asked.set())
        answer = first.ask(1, "who", {})
        assert asked.wait(SOON)
        second.close()
        with pytest.raises(PeerLostError, match="rank 1"):
            answer.result(timeout=SOON)


def test_a_question_to_nobody_fails_at_once() -> None:
    with channels(2) as (first, second):
        second.close()
        with pytest.raises(PeerLostError, match=r"rank 1 is gone: .* has ended \(127.0.0.1:"):
            first.ask(1, "who", {}).result(timeout=SOON)


def test_a_handler_that_fails_is_logged_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with channels(2) as (first, second):
        second.on("bad", lambda rank, meta, body: {"never": 1 // 0})
        inbox = Inbox(second)
        with caplog.at_level(logging.ERROR):
            first.send(1, "bad", {})
            first.send(1, "unheard of", {})
            first.send(1, "note", {})
            inbox.wait_for(1)
        logged = [record.getMessage() for record in caplog.records]
        assert logged == [
            "message 'bad' of rank 0 could not be handled",
            "message 'unheard of' of rank 0 could not be handled",
        ]


@pytest.mark.parametrize("who_spoke", ["survivor", "closer", "both", "watched only"])
def test_the_end_of_a_peer_is_told_once_and_sends_to_it_fail(who_spoke: str) -> None:
    with channels(2) as (survivor, closer):
        lost: list[int] = []
        survivor.on_lost(lost.append)
        inboxes = [Inbox(survivor), Inbox(closer)]
        if who_spoke in ("survivor", "both"):
            survivor.send(1, "note", {})
            inboxes[1].wait_for(1)
        if who_spoke in ("closer", "both"):
            closer.send(0, "note", {})
            inboxes[0].wait_for(1)
        if who_spoke == "watched only":
            survivor.watch(1)
        assert not survivor.is_lost(1)
        closer.close()
        eventually(lambda: lost == [1], "on_lost")
        assert survivor.is_lost(1)
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            survivor.send(1, "note", {})
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            survivor.watch(1)
        time.sleep(0.05)
        assert lost == [1]


def test_the_last_words_of_a_peer_come_before_the_news_of_its_end() -> None:
    for _ in range(20):
        with channels(2) as (survivor, closer):
            events: list[str] = []
            survivor.on_lost(lambda rank, events=events: events.append("lost"))
            survivor.on("note", lambda r, meta, b, events=events: events.append(meta["text"]))
            survivor.watch(1)
            for text in ("first", "second", "last"):
                closer.send(0, "note", {"text": text}, b"x" * 5000)
            closer.close()
            eventually(lambda events=events: "lost" in events, "on_lost")
            assert events == ["first", "second", "last", "lost"]


def test_only_those_who_knew_a_peer_hear_of_its_end() -> None:
    with channels(3) as (first, second, third):
        lost: dict[int, list[int]] = {0: [], 1: []}
        first.on_lost(lost[0].append)
        second.on_lost(lost[1].append)
        first.watch(2)
        first.watch(1)
        third.close()
        eventually(lambda: lost[0] == [2], "on_lost of the one who watched")
        assert lost[1] == [] and not first.is_lost(1)


def test_closing_tells_nothing_to_oneself() -> None:
    with channels(2) as (first, second):
        lost: list[int] = []
        first.on_lost(lost.append)
        second.on("who", lambda rank, meta, body: {"name": "second"})
        assert ask_who(first, 1) == "second"
        first.close()
        first.close()
        assert lost == []


def test_a_stranger_without_the_token_is_refused_and_not_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = Channel(rank=1, host="127.0.0.1", token="of another job")
    own = Channel(rank=0, host="127.0.0.1", token=TOKEN)
    try:
        connect(own, stranger)
        inbox, lost = Inbox(own), list[int]()
        own.on_lost(lost.append)
        with suppress(PeerLostError):  # it may be thrown out in the middle of its words
            stranger.send(0, "note", {})
        eventually(lambda: stranger.is_lost(0), "the refusal")
        assert inbox.taken == [] and lost == []
        assert "without this job's token" in caplog.text
    finally:
        stranger.close()
        own.close()


GARBAGE = {
    "zeros": b"\0" * 64,
    "not json": struct.pack("!II", 3, 0) + b"{x}",
    "not text": struct.pack("!II", 2, 0) + b"\xff\xfe",
    "json of another kind": struct.pack("!II", 2, 0) + b"42",
    "hello without a rank": b"".join([struct.pack("!II", 29, 0), b'["hello", {"token": "of no"}]']),
    "web request": b"GET / HTTP/1.1\r\nHost: tpu\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("farewell", ["close", "reset"])
def test_garbage_from_a_port_scanner_harms_nobody(garbage: bytes, farewell: str) -> None:
    with channels(2) as (first, second):
        second.on("who", lambda rank, meta, body: {"name": "second"})
        for _ in range(5):
            scanner = socket.create_connection(second.address, SOON)
            if farewell == "reset":
                linger = struct.pack("ii", 1, 0)
                scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if garbage:
                scanner.sendall(garbage)
            scanner.close()
        assert ask_who(first, 1) == "second"
        assert ask_who(first, 1) == "second"


def test_both_ends_may_say_the_first_word_at_once() -> None:
    for _ in range(20):
        with channels(2) as (first, second):
            inboxes = [Inbox(first), Inbox(second)]
            barrier = threading.Barrier(2)

            def speak(channel: Channel, to: int, barrier: threading.Barrier = barrier) -> None:
                barrier.wait(SOON)
                channel.send(to, "note", {})

            with ThreadPoolExecutor(2) as pool:
                for future in [pool.submit(speak, first, 1), pool.submit(speak, second, 0)]:
                    future.result(timeout=SOON)
            for inbox in inboxes:
                inbox.wait_for(1)


def test_a_closed_channel_leaves_no_thread_and_no_open_file() -> None:
    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def live_and_close() -> None:
        with channels(2) as (first, second):
            second.on("who", lambda rank, meta, body: {"name": "second"})
            assert ask_who(first, 1) == "second"

    live_and_close()
    before = resources()
    for _ in range(5):
        live_and_close()
    assert resources() == before
