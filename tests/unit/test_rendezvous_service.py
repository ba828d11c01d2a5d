"""The rendezvous service: rounds, ranks, failures, and hosts that come and go."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rendezvous_hosts import TestHost, host, hosts_of, in_loop, serving

from tpu_dist.launch.errors import RendezvousError
from tpu_dist.launch.service import job, membership
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.metrics import serve_page


def place(slice_index: int, number: int, names: tuple[str, ...] = ()) -> pb.Place:
    return pb.Place(
        topology="v5p:2x2x2*2", slice=slice_index, host=number, num_chips=4, hostnames=names
    )


@pytest.mark.parametrize("order", [("b", "a", "c"), ("c", "b", "a"), ("a", "c", "b")])
def test_ranks_are_the_same_whatever_the_order_of_arrival(order: tuple[str, ...]) -> None:
    async def test() -> None:
        descriptions = [host(name, hosts=3, num_workers=ord(name) - 96) for name in order]
        async with serving() as (_, port), hosts_of(port, *descriptions) as hosts:
            got = [await hosts[name].round(1) for name in "abc"]
            assert [each.rank for each in got] == [0, 1, 2]
            assert [each.first_worker for each in got] == [0, 1, 3]
            assert {each.num_workers for each in got} == {6}
            assert {each.store.port for each in got[1:]} == {1}
            await hosts["a"].die()
            again = TestHost(port, host("a", hosts=3, num_workers=1, incarnation="second"))
            assert [(await hosts[name].round(2)).rank for name in "bc"] == [1, 2]
            assert (await again.round(2)).rank == 0
            await again.die()

    in_loop(test())


@pytest.mark.parametrize(
    "given",
    [
        [host(f"vm-{n}", hosts=4) for n in (2, 9, 10, 100)],
        [host(name, hosts=4, node_rank=rank) for rank, name in enumerate("dcba")],
        [
            host(name, hosts=4, place=place(*spot), num_workers=4)
            for name, spot in zip("dcba", [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True)
        ],
    ],
    ids=["by name, as people count", "by node rank", "by topology"],
)
def test_what_hosts_are_ranked_by(given: list[pb.Host]) -> None:
    async def test() -> None:
        async with serving() as (_, port), hosts_of(port, *reversed(given)) as hosts:
            got = [await hosts[each.name].round(1) for each in given]
            assert [each.rank for each in got] == [0, 1, 2, 3]
            if given[0].HasField("place"):  # the addresses are those of a host's own slice
                assert list(got[0].addresses) == ["d.test", "c.test"]
                assert list(got[3].addresses) == ["b.test", "a.test"]
                assert {each.coordinator for each in got} == {"d.test"}

    in_loop(test())


def test_a_lost_host_is_named_to_all_and_the_round_forms_anew() -> None:
    async def test() -> None:
        names = ("a", "b", "c")
        async with (
            serving() as (server, port),
            hosts_of(port, *(host(name, hosts=3) for name in names)) as hosts,
        ):
            for each in hosts.values():
                await each.round(1)
            await hosts["c"].die()
            for name in "ab":
                assert "host c is lost" in (await hosts[name].hear("broken")).cause
                verdict = await hosts[name].hear("verdict")
                assert (verdict.failure.host, verdict.failure.is_host) == ("c", True)
                assert verdict.restarts == 1
            back = TestHost(port, host("c", hosts=3, incarnation="second"))
            assert {(await each.round(2)).restarts for each in (hosts["a"], hosts["b"], back)} == {
                1
            }
            assert server.counters.hosts_lost == 1
            assert server.counters.restarts == 1
            await back.die()

    in_loop(test())


def test_the_first_failure_is_told_to_all_and_ends_the_run_when_restarts_run_out() -> None:
    async def test() -> None:
        descriptions = [host(name, hosts=3, max_restarts=0) for name in "abc"]
        async with serving() as (_, port), hosts_of(port, *descriptions) as hosts:
            for each in hosts.values():
                await each.round(1)
            # c's failure is heard of first, but b's was earlier.
            hosts["b"].failure = pb.Failure(rank=2, exit_code=7, age_seconds=3, traceback="first")
            hosts["c"].tell(pb.FAILING, failure=pb.Failure(rank=4, exit_code=9, age_seconds=0.5))
            for each in hosts.values():
                closed = await each.hear("closed")
                assert (closed.failure.host, closed.failure.rank) == ("b", 2)
                assert closed.failure.traceback == "first"
                assert not closed.succeeded

    in_loop(test())


def test_a_host_that_is_lost_explains_the_failures_that_were_heard_of_before() -> None:
    async def test() -> None:
        async with serving() as (_, port), hosts_of(port, host("a"), host("b")) as hosts:
            for each in hosts.values():
                await each.round(1)
            hosts["a"].failure = pb.Failure(rank=0, exit_code=1, age_seconds=0.2)
            hosts["a"].tell(pb.FAILING, failure=hosts["a"].failure)
            await asyncio.sleep(0)
            await hosts["b"].die()
            hosts["a"].tell(pb.STOPPED)
            verdict = await hosts["a"].hear("verdict")
            assert (verdict.failure.host, verdict.failure.is_host) == ("b", True)

    in_loop(test())


def test_all_are_done_when_the_last_is() -> None:
    async def test() -> None:
        async with serving() as (_, port), hosts_of(port, host("a"), host("b")) as hosts:
            for each in hosts.values():
                await each.round(1)
            hosts["a"].tell(pb.DONE)
            await asyncio.sleep(0.1)
            assert not hosts["a"].task.done()
            hosts["b"].tell(pb.DONE)
            for each in hosts.values():
                assert (await each.hear("closed")).succeeded
                await each.task

    in_loop(test())


def test_a_failure_elsewhere_starts_a_host_anew_that_was_done() -> None:
    async def test() -> None:
        async with serving() as (_, port), hosts_of(port, host("a"), host("b")) as hosts:
            for each in hosts.values():
                await each.round(1)
            hosts["a"].tell(pb.DONE)
            hosts["b"].tell(pb.FAILING, failure=pb.Failure(rank=2, exit_code=1))
            hosts["b"].tell(pb.STOPPED)
            for each in hosts.values():
                assert (await each.round(2)).restarts == 1

    in_loop(test())


def test_more_hosts_may_come_where_more_are_wanted() -> None:
    async def test() -> None:
        async def wanted(name: str) -> pb.Host:
            return host(name, hosts=2, max_hosts=3, last_call_seconds=0.2)

        async with (
            serving() as (_, port),
            hosts_of(port, await wanted("b"), await wanted("c")) as hosts,
        ):
            assert (await hosts["b"].round(1)).num_hosts == 2
            late = TestHost(port, await wanted("a"))
            for each in (*hosts.values(), late):
                got = await each.round(2)
                assert (got.num_hosts, got.restarts) == (3, 0)  # nothing had failed
            await late.die()
            assert (await hosts["b"].round(3)).num_hosts == 2

    in_loop(test())


def test_a_spare_host_takes_the_place_of_a_lost_one() -> None:
    async def test() -> None:
        names = ("a", "b", "spare")
        async with (
            serving() as (_, port),
            hosts_of(port, *(host(name) for name in names)) as hosts,
        ):
            await hosts["b"].round(1)
            assert hosts["spare"].assigned is None
            await hosts["a"].die()
            assert (await hosts["b"].round(2)).rank == 0
            assert (await hosts["spare"].round(2)).rank == 1

    in_loop(test())


def test_hosts_that_never_came_are_named() -> None:
    async def test() -> None:
        first = host("a", hosts=4, join_seconds=0.5, place=place(0, 0, ("vm-0", "vm-1")))
        other = host("b", hosts=4, join_seconds=0.5, place=place(1, 1))
        async with serving() as (_, port), hosts_of(port, first, other) as hosts:
            for each in hosts.values():
                closed = await each.hear("closed")
                assert "only 2 of 4 hosts came within 0.5 s" in closed.reason
                assert "host 1 of slice 0 (vm-1), host 0 of slice 1" in closed.reason
                assert "here: a, b" in closed.reason

    in_loop(test())


def test_who_waits_is_told_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "NOTICE_SECONDS", 0.1)

    async def test() -> None:
        async with serving() as (_, port), hosts_of(port, host("a"), host("b")) as hosts:
            for each in hosts.values():
                await each.round(1)
            await hosts["b"].die()
            waiting = await hosts["a"].hear("waiting")
            assert (waiting.here, waiting.wanted) == (1, 2)
            assert "b (gone 0 s ago: its connection ended" in waiting.missing

    in_loop(test())


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (host("a", incarnation="other"), "host a is in run 'run' already"),
        (host("b", place=place(0, 1)), "has the topology v5p:2x2x2.2, and host a .* has none"),
        (host("b", hosts=3), "host b has --nnodes 3:3, and host a of run 'run' has 2:2"),
        (host("b", max_restarts=9), "has --max-restarts 9, and host a of run 'run' has 3"),
        (host("b", versions={"torch": "1"}), "the version of torch 1, and host a .* has none"),
        (host("b", node_rank=1), None),
    ],
)
def test_a_host_that_does_not_fit_is_refused(
    second: pb.Host, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_TWICE_SECONDS", 0.2)

    async def test() -> None:
        async with serving() as (server, port), hosts_of(port, host("a"), second):
            pass
        async with serving() as (server, port), hosts_of(port, host("a")) as hosts:
            other = TestHost(port, second)
            if message is None:
                assert (await other.round(1)).num_hosts == 2
                await other.die()
                return
            with pytest.raises(RendezvousError, match=message):
                await other.task
            assert server.counters.peers_refused >= 1
            good = TestHost(port, host("c"))
            await hosts["a"].round(1)
            await good.die()

    in_loop(test())


def test_the_same_place_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_TWICE_SECONDS", 0.2)

    async def test() -> None:
        first = host("a", hosts=4, place=place(0, 1))
        async with serving() as (_, port), hosts_of(port, first):
            other = TestHost(port, host("b", hosts=4, place=place(0, 1)))
            with pytest.raises(RendezvousError, match="both say they are host 1 of slice 0"):
                await other.task

    in_loop(test())


def test_a_host_that_came_anew_waits_until_its_old_connection_is_found_dead() -> None:
    async def test() -> None:
        async with serving() as (_, port), hosts_of(port, host("a"), host("b")) as hosts:
            for each in hosts.values():
                await each.round(1)
            again = TestHost(port, host("b", incarnation="second"))
            await asyncio.sleep(0.2)
            assert again.assigned is None and not again.task.done()
            await hosts["b"].die()
            assert (await again.round(2)).rank == 1
            await again.die()

    in_loop(test())


def test_a_service_that_is_started_anew_finds_its_hosts_and_breaks_nothing() -> None:
    async def test() -> None:
        async with serving() as (_, port):
            context = hosts_of(port, host("a"), host("b"))
            hosts = await context.__aenter__()
            for each in hosts.values():
                await each.round(1)
        async with serving(port=port) as (server, _):
            await hosts["a"].until(lambda: True)
            while server.num_hosts < 2:
                await asyncio.sleep(0.02)
            assert not [m for each in hosts.values() for m in each.heard if m.HasField("broken")]
            # It knows the round, its number and its members.
            await hosts["b"].die()
            assert "host b is lost" in (await hosts["a"].hear("broken")).cause
            back = TestHost(port, host("b", incarnation="second"))
            assert (await back.round(2)).restarts == 1
            await back.die()
            await context.__aexit__(None, None, None)

    in_loop(test())


def test_a_host_that_does_not_find_the_new_service_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "RECOVERY_SECONDS", 0.5)

    async def test() -> None:
        async with serving() as (_, port):
            context = hosts_of(port, host("a"), host("b"))
            hosts = await context.__aenter__()
            for each in hosts.values():
                await each.round(1)
        await hosts["b"].die()
        async with serving(port=port):
            broken = await hosts["a"].hear("broken")
            assert "host b is lost: it did not come back to the server" in broken.cause
            await context.__aexit__(None, None, None)

    in_loop(test())


def test_health_and_metrics_can_be_asked_for() -> None:
    async def test() -> None:
        async with serving() as (server, port), hosts_of(port, host("a")):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest()
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            while not server.num_hosts:
                await asyncio.sleep(0.01)
            page = await serve_page(server.page, "127.0.0.1", 0)
            async with page:
                where = page.sockets[0].getsockname()[1]
                reader, writer = await asyncio.open_connection("127.0.0.1", where)
                writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
                text = (await reader.read()).decode()
                writer.close()
            assert text.startswith("HTTP/1.1 200 OK")
            assert "# TYPE tpu_launch_rounds_total counter\ntpu_launch_rounds_total 0\n" in text
            assert "tpu_launch_hosts_waiting 1\n" in text

    in_loop(test())
