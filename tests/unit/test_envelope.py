"""Envelopes: what is packed is unpacked, and each disagreement is named, with its ranks."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.collectives.dtypes import WIRE_TYPES, wire_type
from tpu_dist.collectives.envelope import (
    INLINE_BYTES,
    VERBS,
    Envelope,
    Signature,
    check_agreement,
    choose_group,
    group_digest,
    pack,
    unpack,
)
from tpu_dist.collectives.reducers import REDUCERS
from tpu_dist.errors import MismatchError

CALL = Signature(
    group="0",
    uid="epoch/0",
    sequence=7,
    verb="all_reduce",
    wire=wire_type(torch.float32),
    reducer=REDUCERS["SUM"],
    shape=(3, 5),
)
RANKS = (4, 6, 9)

SHAPES = st.none() | st.lists(st.integers(0, 30), max_size=12).map(tuple)
COUNTS = st.lists(st.integers(0, 1 << 50), min_size=5, max_size=5).map(tuple)
SIGNATURES = st.builds(
    Signature,
    group=st.text(min_size=1),
    uid=st.text(min_size=1),
    sequence=st.integers(1, 1 << 60),
    verb=st.sampled_from(VERBS),
    wire=st.none() | st.sampled_from(list(WIRE_TYPES.values())),
    reducer=st.none() | st.sampled_from(list(REDUCERS.values())),
    root=st.none() | st.integers(0, 4),
    factor=st.floats(allow_nan=False),
    shape=SHAPES,
    sends=COUNTS,
    receives=COUNTS,
)


def arrived(signature: Signature, num_ranks: int = 3, payload: bytes | None = b"") -> Envelope:
    return unpack(pack(signature, payload), num_ranks)


def check(*signatures: Signature) -> None:
    """check_agreement on every rank; the ranks must come to one verdict."""
    envelopes = [arrived(signature, len(signatures)) for signature in signatures]
    said = set()
    for own in signatures:
        try:
            check_agreement(own, envelopes, RANKS[: len(signatures)])
        except MismatchError as error:
            said.add(str(error))
        else:
            said.add("")
    if said != {""}:
        assert "" not in said, "some ranks saw the disagreement, others did not"
        raise MismatchError(" | ".join(sorted(said)))


def but(**changes: Any) -> Signature:
    return dataclasses.replace(CALL, **changes)


@given(
    SIGNATURES,
    st.none() | st.binary(max_size=INLINE_BYTES),
    st.sets(st.binary(min_size=8, max_size=8), max_size=20),
)
def test_what_is_packed_is_unpacked(
    signature: Signature, payload: bytes | None, others: set[bytes]
) -> None:
    envelope = unpack(pack(signature, payload, sorted(others)), 5)
    assert envelope.group == group_digest(signature.uid)
    assert envelope.sequence == signature.sequence
    assert (envelope.sends, envelope.receives) == (signature.sends, signature.receives)
    assert envelope.is_inline == (payload is not None)
    assert bytes(envelope.payload) == (payload or b"")
    assert envelope.others == others
    described = envelope.describe()
    said = [signature.verb]
    said += [signature.wire.name] if signature.wire else []
    said += [signature.reducer.name] if signature.reducer else []
    said += [f"root {signature.root}"] if signature.root is not None else []
    said += [str(signature.shape)] if signature.shape is not None else []
    assert all(word in described for word in said), described


@given(SIGNATURES)
def test_ranks_that_call_the_same_agree(signature: Signature) -> None:
    signature = dataclasses.replace(signature, sends=(), receives=())
    check_agreement(signature, [arrived(signature)] * 3, RANKS)


@given(SIGNATURES, SIGNATURES)
def test_every_envelope_can_be_described(first: Signature, second: Signature) -> None:
    envelopes = [arrived(first, 5), arrived(second, 5)]
    try:
        check_agreement(first, envelopes * 2 + envelopes[:1], (0, 1, 2, 3, 4))
    except MismatchError as error:
        assert "rank" in str(error)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (but(shape=(5, 3)), ["(3, 5)", "(5, 3)"]),
        (but(shape=()), ["(3, 5)", "()"]),
        (but(shape=(3, 5, 1)), ["(3, 5)", "(3, 5, 1)"]),
        (but(wire=wire_type(torch.int32)), ["float32", "int32"]),
        (but(wire=wire_type(torch.float16)), ["float32", "float16"]),
        (but(reducer=REDUCERS["MAX"]), ["SUM", "MAX"]),
        (but(verb="reduce", root=0), ["all_reduce", "reduce", "root 0"]),
        (but(verb="broadcast", reducer=None, root=1), ["all_reduce", "broadcast", "root 1"]),
        (but(verb="barrier", wire=None, reducer=None, shape=None), ["all_reduce", "barrier"]),
        (but(reducer=REDUCERS["PREMUL_SUM"], factor=0.5), ["factor 0.5"]),
        (but(group="1", uid="epoch/1"), ["another group with the same ranks"]),
    ],
    ids=["shape", "0-d", "one more dim", "kind", "width", "op", "verb", "root", "barrier",
         "factor", "group"],
)  # fmt: skip
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_disagreement_is_named_on_every_rank(who: int, other: Signature, said: list[str]) -> None:
    calls = [CALL] * 3
    calls[who] = other
    with pytest.raises(MismatchError) as caught:
        check(*calls)
    rest = [rank for place, rank in enumerate(RANKS) if place != who]
    text = str(caught.value)
    for words in [*said, f"rank {RANKS[who]} called", f"ranks {rest} called"]:
        assert words in text


def test_three_ways_are_all_named() -> None:
    with pytest.raises(MismatchError) as caught:
        check(CALL, but(shape=(15,)), but(wire=wire_type(torch.int64)))
    for rank in RANKS:
        assert f"rank {rank} called" in str(caught.value)


def test_two_factors_disagree() -> None:
    half = but(reducer=REDUCERS["PREMUL_SUM"], factor=0.5)
    with pytest.raises(MismatchError, match=r"factor 0\.5.*factor 0\.25|factor 0\.25.*factor 0\.5"):
        check(half, half, dataclasses.replace(half, factor=0.25))


def test_a_factor_that_is_no_number_is_the_same_on_all_ranks() -> None:
    check(*[but(reducer=REDUCERS["PREMUL_SUM"], factor=float("nan"))] * 3)


def test_long_shapes_agree_and_disagree() -> None:
    long = but(shape=(1, 2, 1, 1, 3, 1, 1, 1, 1, 2))
    check(long, long, long)
    with pytest.raises(MismatchError, match="rank 9 called"):
        check(long, long, but(shape=(1, 2, 1, 1, 3, 1, 1, 1, 2, 1)))


def test_unequal_pieces_are_fine_where_both_ends_agree() -> None:
    matrix = [[0, 3, 1], [2, 5, 0], [7, 0, 4]]  # what row sends to column
    check(*exchanges(matrix, matrix))


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (2, 0), (1, 1)])
def test_pieces_of_two_sizes_are_named_with_both_ends(sender: int, receiver: int) -> None:
    sent = [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
    expected = [row.copy() for row in sent]
    expected[sender][receiver] = 2
    words = f"rank {RANKS[sender]} sends 1 elements to rank {RANKS[receiver]}, which expects 2"
    with pytest.raises(MismatchError, match=words):
        check(*exchanges(sent, expected))


def exchanges(sent: list[list[int]], expected: list[list[int]]) -> list[Signature]:
    return [
        Signature(
            group="0",
            uid="epoch/0",
            sequence=1,
            verb="all_to_all",
            wire=wire_type(torch.float32),
            sends=tuple(sent[rank]),
            receives=tuple(row[rank] for row in expected),
        )
        for rank in range(len(sent))
    ]


UIDS = [f"epoch/{number}" for number in range(30)]


def standing_at(current: int, *waiting: int) -> Envelope:
    others = [group_digest(UIDS[number]) for number in waiting]
    return unpack(pack(but(uid=UIDS[current]), b"", others), 3)


def test_a_group_that_waits_on_every_rank_is_chosen() -> None:
    assert choose_group([standing_at(0, 1), standing_at(1, 2), standing_at(3, 2, 1)]) == (
        group_digest(UIDS[1])
    )
    assert choose_group([standing_at(0, 1), standing_at(1), standing_at(2)]) is None
    many = range(1, 30)
    assert choose_group([standing_at(0, *many), standing_at(29)]) == group_digest(UIDS[29])
