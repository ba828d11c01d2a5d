"""Who and what the rendezvous service does not let in, and that it disturbs nobody."""

from __future__ import annotations

import asyncio
import math
import subprocess
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendezvous_hosts import TestHost, host, in_loop, serving

from tpu_dist.launch.errors import LaunchError, RendezvousError
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.checks import (
    MAX_MESSAGE_BYTES,
    MAX_SPARES,
    Refused,
    check_host,
    parse_message,
)
from tpu_dist.launch.service.security import Security
from tpu_dist.launch.service.server import SERVICE, RendezvousServer

TOKEN = "0123456789abcdef"
JOIN = f"/{SERVICE}/Join"


async def send(port: int, *messages: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    """Send raw messages on a stream, and return the status that ends it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(JOIN)(iter(messages), metadata=metadata)
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return str((await call.code()).name)


@pytest.mark.parametrize("token", [None, "not the token of it", f"{TOKEN}0"])
def test_a_peer_without_the_token_is_refused_and_disturbs_nobody(token: str | None) -> None:
    async def test() -> None:
        right, wrong = Security(token=TOKEN), Security(token=token)
        async with serving(right) as (server, port):
            first = TestHost(port, host("a"), right)
            stranger = TestHost(port, host("b"), wrong)
            with pytest.raises(RendezvousError, match="refuses: this run wants its token"):
                await stranger.task
            second = TestHost(port, host("b"), right)
            assert (await second.round(1)).num_hosts == 2
            await first.round(1)
            assert server.counters.peers_refused == 1
            await first.die()
            await second.die()

    in_loop(test())


@pytest.mark.parametrize(
    "messages",
    [
        (b"\xff\xff\xff",),
        (b"",),
        (pb.FromHost(host=pb.Host(name="x")).SerializeToString(),),
        (pb.FromHost(host=host("b\nc")).SerializeToString(),),
        (pb.FromHost(host=host("b", hosts=2**20)).SerializeToString(),),
        (pb.FromHost(host=host("b", stop_seconds=math.nan)).SerializeToString(),),
        (pb.FromHost(host=host("b"), standing=pb.Standing(round=-1)).SerializeToString(),),
        (
            pb.FromHost(
                host=host("b"),
                standing=pb.Standing(state=pb.RUNNING, round=1, rank=9, num_hosts=3),
            ).SerializeToString(),
        ),
        (pb.FromHost(host=host("b"), standing=pb.Standing(state=99)).SerializeToString(),),  # type: ignore[arg-type]
        (b"\x00" * (MAX_MESSAGE_BYTES + 1),),
        (pb.FromHost(host=host("b", hosts=3)).SerializeToString(), b"\xff\xff\xff"),
    ],
)
def test_what_cannot_be_read_is_refused_and_disturbs_nobody(messages: tuple[bytes, ...]) -> None:
    async def test() -> None:
        async with serving() as (server, port):
            first = TestHost(port, host("a", hosts=3))
            while not server.num_hosts:  # else the other might be the first, and the run be its
                await asyncio.sleep(0.01)
            assert await send(port, *messages) in {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
            others = [TestHost(port, host(name, hosts=3)) for name in "bc"]
            for each in (first, *others):
                assert (await each.round(1)).num_hosts == 3
                await each.die()

    in_loop(test())


def test_bytes_that_are_not_http_disturb_nobody() -> None:
    async def test() -> None:
        async with serving() as (_, port):
            first = TestHost(port, host("a"))
            for junk in (
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(range(256)) * 64,
                b"\x16\x03\x01\x02\x00",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(junk)
                async with asyncio.timeout(30):
                    try:
                        while await reader.read(4096):
                            pass
                    except ConnectionError:
                        pass
                writer.close()
            second = TestHost(port, host("b"))
            for each in (first, second):
                await each.round(1)
                await each.die()

    in_loop(test())


def test_the_number_of_hosts_is_bounded() -> None:
    async def test() -> None:
        async with serving() as (server, port):
            hosts = [TestHost(port, host(f"h{n}", hosts=1)) for n in range(1 + MAX_SPARES)]
            while server.num_hosts < len(hosts):
                await asyncio.sleep(0.01)
            more = pb.FromHost(host=host("more", hosts=1)).SerializeToString()
            assert await send(port, more) == "RESOURCE_EXHAUSTED"
            for each in hosts:
                await each.die()

    in_loop(test())


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]"])
def test_where_others_can_reach_it_the_service_wants_something_to_know_them_by(
    address: str,
) -> None:
    async def test() -> None:
        server = RendezvousServer()
        with pytest.raises(LaunchError, match="TPU_LAUNCH_TOKEN_FILE"):
            await server.start(address, 0)
        await server.stop()
        protected = RendezvousServer(security=Security(token=TOKEN))
        assert await protected.start("0.0.0.0", 0)
        await protected.stop()

    in_loop(test())


def test_a_token_that_could_be_guessed_is_no_token() -> None:
    with pytest.raises(LaunchError, match="has 5 characters, and needs at least 16"):
        Security(token="short")


def test_with_certificates_both_sides_are_known_and_a_stranger_is_not(tmp_path: Path) -> None:
    good, other = tmp_path / "job", tmp_path / "stranger"
    make_certificates(good)
    make_certificates(other)

    async def test() -> None:
        security = Security(tls_directory=good)
        async with serving(security) as (_, port):
            hosts = [TestHost(port, host(name), security) for name in "ab"]
            for kind in (Security(), Security(tls_directory=other)):
                stranger = TestHost(port, host("c"), kind)
                await asyncio.sleep(0.3)
                assert stranger.membership.num_connections == 0
                await stranger.die()
            for each in hosts:
                await each.round(1)
                await each.die()

    in_loop(test())


def make_certificates(folder: Path) -> None:
    """Make an authority and a certificate of it for 127.0.0.1."""
    folder.mkdir()
    run = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    common = ("-nodes", "-days", "1", "-addext", "subjectAltName=IP:127.0.0.1")
    ca = ("-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    leaf = ("-subj", "/CN=host", "-keyout", "tls.key", "-out", "tls.crt")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    for arguments in ((*run, *common[:3], *ca), (*run, *common, *leaf, *signed)):
        subprocess.run(arguments, cwd=folder, check=True, capture_output=True, timeout=60)


TEXT = st.text(max_size=40)
NUMBER = st.integers(-(2**31), 2**31 - 1)
FLOAT = st.floats(allow_nan=True, allow_infinity=True)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        check_host(parse_message(data).host)
    except Refused as refused:
        assert refused.why


@given(
    name=TEXT,
    run_id=TEXT,
    numbers=st.tuples(*[NUMBER] * 8),
    floats=st.tuples(*[FLOAT] * 3),
    coords=st.lists(NUMBER, max_size=4),
    versions=st.dictionaries(TEXT, TEXT, max_size=20),
)
def test_any_host_is_let_in_or_refused(
    name: str,
    run_id: str,
    numbers: tuple[int, ...],
    floats: tuple[float, float, float],
    coords: list[int],
    versions: dict[str, str],
) -> None:
    low, high, restarts, workers, rank, slice_index, number, chips = numbers
    one = pb.Host(
        run_id=run_id,
        name=name,
        incarnation="x",
        address="y",
        num_workers=workers,
        node_rank=rank,
        versions=versions,
        place=pb.Place(
            topology=name, slice=slice_index, host=number, num_chips=chips, coords=coords
        ),
        terms=pb.Terms(
            min_hosts=low,
            max_hosts=high,
            max_restarts=restarts,
            join_seconds=floats[0],
            last_call_seconds=floats[1],
            stop_seconds=floats[2],
        ),
    )
    try:
        check_host(one)
    except Refused as refused:
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    else:
        assert 1 <= low <= high and all(map(math.isfinite, floats)) and name and run_id


@settings(max_examples=20)
@given(st.sampled_from(pb.State.values()), st.data())
def test_whatever_hosts_say_of_themselves_the_service_lives_on(
    state: int, data: st.DataObject
) -> None:
    small = st.integers(0, 3)

    async def test() -> None:
        async with serving() as (_, port):
            standing = pb.Standing(
                state=state,  # type: ignore[arg-type]
                round=data.draw(small),
                rank=data.draw(small),
                num_hosts=data.draw(small),
                restarts=data.draw(small),
                members=data.draw(st.lists(st.sampled_from(["a", "b", "c"]), max_size=4)),
                failure=pb.Failure(age_seconds=data.draw(FLOAT), rank=data.draw(NUMBER)),
            )
            first = pb.FromHost(host=host("x"), standing=standing).SerializeToString()
            then = pb.FromHost(standing=standing).SerializeToString()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.stream_stream(JOIN)()
                try:
                    for message in (first, then, then):
                        await call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass
                call.cancel()
            hosts = [TestHost(port, host(name, run_id="other")) for name in "ab"]
            for each in hosts:
                await each.round(1)
                await each.die()

    in_loop(test())
