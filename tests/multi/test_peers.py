"""A peer that is killed or stopped: the others hear of it soon, by name, and go on."""

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from failures import LARGE, Attempt, all_reduce, assert_clean_exit, attempt, await_end
from ranks import Ranks, gloo_cannot, mark, run_ranks, wait_mark

pytestmark = gloo_cannot("its errors do not say whose process has ended")

SOON = 6.0  # seconds within which survivors must know
LIMIT = timedelta(seconds=40)


def assert_lost(result: Attempt, dead: int, *, seconds: float = SOON) -> None:
    assert result.error in ("PeerLostError", "CollectiveError"), result
    assert f"rank {dead}" in result.text, result
    assert "has ended" in result.text, result
    assert result.seconds < seconds, result


def until_lost(rank: int, dead: int, numel: int) -> Attempt:
    """all_reduces until one fails; rank `dead` is killed meanwhile."""
    all_reduce(numel=numel)
    mark("running")
    while True:
        result = attempt(lambda: all_reduce(numel=numel))
        if not result.ok:
            return result


def loop_then_survivors(rank: int, dead: int, numel: int) -> tuple[Attempt, Attempt, Attempt]:
    """Loses `dead` in the world, and goes on in a group that was made before."""
    survivors = [other for other in range(dist.get_world_size()) if other != dead]
    group = dist.new_group(survivors)
    result = until_lost(rank, dead, numel)
    later = attempt(all_reduce)
    among_us = attempt(lambda: [all_reduce(group), all_reduce(group, LARGE), dist.barrier(group)])
    return result, later, among_us


@pytest.mark.parametrize(("world_size", "dead", "numel"), [(3, 0, LARGE), (4, 3, 3)])
def test_survivors_of_a_killed_peer_know_it_and_go_on_without_it(
    world_size: int, dead: int, numel: int
) -> None:
    with Ranks(loop_then_survivors, world_size, args=(dead, numel)) as ranks:
        for rank in range(world_size):
            ranks.wait_mark(rank, "running")
        time.sleep(0.1)
        ranks.kill(dead)
        survivors = [rank for rank in range(world_size) if rank != dead]
        for outcome in ranks.results(LIMIT, of=survivors):
            assert outcome.ok, outcome.traceback
            result, later, among_us = outcome.value
            assert_lost(result, dead)
            assert later.error == "CollectiveError" and "given up earlier" in later.text
            assert later.seconds < 1
            assert among_us.ok, among_us
        assert_clean_exit(ranks, survivors)


def idle_then(rank: int, dead: int, kind: str, warm: bool) -> Attempt | None:
    """Rank `dead` is killed while it does nothing; then the others call."""
    if warm:
        all_reduce()
    mark("idle")
    if rank == dead:
        time.sleep(60)
    wait_mark(dead, "is dead")
    calls = {
        "all_reduce": lambda: all_reduce(numel=3),
        "large": lambda: all_reduce(numel=LARGE),
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.empty(3), src=dead),
        "large send": lambda: dist.send(torch.ones(LARGE), dst=dead),
        "monitored barrier": lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=30)),
    }
    return attempt(calls[kind])


def kill_while_idle(ranks: Ranks, dead: int) -> None:
    for rank in range(ranks.world_size):
        ranks.wait_mark(rank, "idle")
    ranks.kill(dead)
    ranks._marks.set(f"mark/{dead}/is dead", "1")


@pytest.mark.parametrize(
    ("world_size", "dead", "kind", "warm"),
    [
        (2, 0, "large", True),
        (3, 0, "barrier", False),
        (2, 1, "recv", False),
        (2, 0, "large send", True),
        (3, 0, "monitored barrier", False),
    ],
)
def test_a_call_after_a_peers_silent_death_fails_soon(
    world_size: int, dead: int, kind: str, warm: bool
) -> None:
    with Ranks(idle_then, world_size, args=(dead, kind, warm)) as ranks:
        kill_while_idle(ranks, dead)
        survivors = [rank for rank in range(world_size) if rank != dead]
        for outcome in ranks.results(LIMIT, of=survivors):
            assert outcome.ok, outcome.traceback
            assert_lost(outcome.value, dead)
        assert_clean_exit(ranks, survivors)


def wait_for_messages_of(rank: int, dead: int) -> list[Attempt]:
    """Receives and sends that wait when their peer is killed; one from somebody else goes on."""
    if rank == dead:
        mark("idle")
        time.sleep(60)
    if rank == 2:
        wait_mark(dead, "is dead")
        time.sleep(0.5)
        dist.send(torch.full((3,), 2.0), dst=0)
        return []
    from_anybody = torch.empty(3)
    works = [
        dist.irecv(torch.empty(3), src=dead, tag=1),
        dist.irecv(torch.empty(LARGE), src=dead, tag=2),
        dist.isend(torch.ones(3), dst=dead, tag=3),
        dist.isend(torch.ones(LARGE), dst=dead, tag=4),
    ]
    anybody = dist.irecv(from_anybody)
    mark("idle")
    results = [await_end(work, timedelta(seconds=SOON)) for work in works]
    anybody.wait()
    assert from_anybody.eq(2).all()
    return results


def test_messages_that_wait_for_a_killed_peer_fail_and_others_do_not() -> None:
    with Ranks(wait_for_messages_of, 3, args=(1,)) as ranks:
        for rank in (0, 1):
            ranks.wait_mark(rank, "idle")
        ranks.kill(1)
        ranks._marks.set("mark/1/is dead", "1")
        waiting, sender = ranks.results(LIMIT, of=[0, 2])
        assert sender.ok and waiting.ok, waiting.traceback
        assert len(waiting.value) == 4
        for result in waiting.value:
            assert_lost(result, 1)
        assert_clean_exit(ranks, [0, 2])


def of_its_own_store(rank: int, numel: int) -> Attempt:
    """As without a launcher: rank 0 serves the store, and takes it along when it is killed."""
    dist.init_process_group("tpu_dist")
    return until_lost(rank, 0, numel)


def own_store(port: int) -> dict[str, str | None]:
    return {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(port)}


@pytest.mark.parametrize("numel", [3, LARGE])
def test_the_death_of_the_rank_that_serves_the_store_is_survived(
    numel: int, free_port: int
) -> None:
    with Ranks(of_its_own_store, 3, args=(numel,), init=False, env=own_store(free_port)) as ranks:
        for rank in range(3):
            ranks.wait_mark(rank, "running")
        ranks.kill(0)
        for outcome in ranks.results(LIMIT, of=[1, 2]):
            assert outcome.ok, outcome.traceback
            assert_lost(outcome.value, 0)
        assert_clean_exit(ranks, [1, 2])


def store_dies_first(rank: int) -> Attempt | None:
    """The store is gone before the group's first collective."""
    dist.init_process_group("tpu_dist")
    mark("idle")
    if rank == 0:
        time.sleep(60)
    wait_mark(0, "is dead")
    return attempt(all_reduce)


def test_a_first_collective_without_the_store_fails_soon(free_port: int) -> None:
    with Ranks(store_dies_first, 3, init=False, env=own_store(free_port)) as ranks:
        kill_while_idle(ranks, 0)
        for outcome in ranks.results(LIMIT, of=[1, 2]):
            assert outcome.ok, outcome.traceback
            assert_lost(outcome.value, 0)
        assert_clean_exit(ranks, [1, 2])


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def stopped(rank: int, numel: int, warm: bool) -> Attempt | None:
    if warm:
        all_reduce(numel=numel)
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    mark("idle")
    wait_mark(1, "is stopped")
    return attempt(lambda: all_reduce(numel=numel))


@pytest.mark.parametrize(("numel", "warm"), [(LARGE, True), (3, False)])
def test_a_stopped_peer_is_said_not_to_answer_and_nobody_hangs_at_the_end(
    numel: int, warm: bool
) -> None:
    with Ranks(stopped, 3, args=(numel, warm)) as ranks:
        for rank in range(3):
            ranks.wait_mark(rank, "idle")
        ranks.stop(1)
        ranks._marks.set("mark/1/is stopped", "1")
        for outcome in ranks.results(LIMIT, of=[0, 2]):
            assert outcome.ok, outcome.traceback
            result = outcome.value
            assert result.error == "CollectiveTimeoutError", result
            assert "missing ranks [1]" in result.text and "does not answer" in result.text
            assert result.seconds < 2 + 3
        exit_without(ranks, stopped_rank=1)


def exit_without(ranks: Ranks, stopped_rank: int) -> None:
    """The others destroy their groups and exit while one is stopped still."""
    started = time.monotonic()
    for rank in range(ranks.world_size):
        if rank != stopped_rank:
            ranks._connections[rank].send(None)
    for rank in range(ranks.world_size):
        if rank != stopped_rank:
            process = ranks._processes[rank]
            process.join(15)
            assert process.exitcode == 0, (rank, process.exitcode, ranks._tail(rank))
    assert time.monotonic() - started < 10


def stopped_in_the_middle(rank: int) -> Attempt:
    assert dist.group.WORLD is not None
    all_reduce(numel=LARGE)
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    return until_lost(rank, 1, LARGE)


def test_a_peer_stopped_in_the_middle_of_a_payload_times_out() -> None:
    with Ranks(stopped_in_the_middle, 3) as ranks:
        for rank in range(3):
            ranks.wait_mark(rank, "running")
        ranks.stop(1)
        for outcome in ranks.results(LIMIT, of=[0, 2]):
            assert outcome.ok, outcome.traceback
            assert outcome.value.error == "CollectiveTimeoutError", outcome.value
            assert "does not answer" in outcome.value.text
        exit_without(ranks, stopped_rank=1)


def go_on_after_a_pause(rank: int) -> None:
    all_reduce(numel=LARGE)
    mark("running")
    for _ in range(20):
        all_reduce(numel=LARGE)


def test_a_peer_that_is_stopped_for_a_while_is_waited_for() -> None:
    with Ranks(go_on_after_a_pause, 2) as ranks:
        for rank in range(2):
            ranks.wait_mark(rank, "running")
        ranks.stop(1)
        time.sleep(4)  # longer than the engine waits before it asks whether peers live
        ranks.cont(1)
        outcomes = ranks.results(LIMIT)
        assert all(outcome.ok for outcome in outcomes), outcomes
        assert_clean_exit(ranks, [0, 1])


def abort_beside_others(rank: int) -> bool:
    """Sockets that the user opens while a group connects are not the group's."""
    doomed, other = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    if rank > 0:
        all_reduce(other, LARGE)
    server = socket.create_server(("127.0.0.1", 0))
    users: list[tuple[socket.socket, socket.socket]] = []
    if rank < 2:
        work = dist.all_reduce(torch.ones(LARGE), group=doomed, async_op=True)
        assert work is not None
        while not work.is_completed():
            users.append((socket.create_connection(server.getsockname()), server.accept()[0]))
            time.sleep(0.005)
        work.wait()
    dist.barrier()
    if rank == 0:
        doomed.abort()
    if rank < 2:
        result = attempt(lambda: all_reduce(doomed, LARGE))
        assert "abort" in result.text, result
    if rank > 0:
        all_reduce(other, LARGE)
    for here, there in users:
        here.sendall(b"x")
        assert there.recv(1) == b"x"
    return bool(users)


def test_giving_up_a_group_cuts_its_own_connections_alone() -> None:
    assert run_ranks(abort_beside_others, 4)[:2] == [True, True]


def connect_when_told(rank: int) -> Attempt:
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    mark("connecting")
    return attempt(all_reduce)


@pytest.mark.parametrize(
    ("after", "number"), [(0.02, signal.SIGSTOP), (0.15, signal.SIGSTOP), (0.15, signal.SIGKILL)]
)
def test_a_peer_lost_while_the_group_connects_hangs_nobody(after: float, number: int) -> None:
    """The first collective opens connections, in C++; there is nothing to cut yet."""
    with Ranks(connect_when_told, 2) as ranks:
        ranks.wait_mark(1, "connecting")
        time.sleep(after)
        os.kill(ranks.pids[1], number)
        outcome = ranks.results(LIMIT, of=[0])[0]
        assert outcome.ok, outcome.traceback
        result = outcome.value
        if not result.ok:  # it may have been through already
            assert "rank 1" in result.text, result
            assert result.seconds < 3 + SOON
        exit_without(ranks, stopped_rank=1)
