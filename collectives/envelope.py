"""The envelope: what each rank says of its call before any payload moves.

Every collective begins with an all-gather of envelopes of one fixed size. So ranks that call
different things find out, on every rank and by name, instead of hanging, crashing (gloo inside XLA
ends the process when two sizes differ) or summing apples and pears; small payloads travel inside
it, and are done.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tpu_dist.collectives import dtypes, reducers
from tpu_dist.topology.errors import MismatchError

INLINE_BYTES = 4096  # payload that fits into an envelope
_MAX_DIMS = 8
MAX_OTHERS = 8  # groups with the same members of which calls may wait at once
_HEADER = struct.Struct(f"<QQ8sBBBBiId{_MAX_DIMS}qI{8 * MAX_OTHERS}s")

VERBS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "transfer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What must agree between the ranks of one collective.

    Attributes:
        group: name of the process group, for people.
        uid: tells the group from all others.
        sequence: number of this collective in its group, from 1.
        verb: one of VERBS.
        wire: dtype of the payload; None for a barrier.
        reducer: for verbs that reduce.
        root: group rank, for verbs that have one.
        factor: of PREMUL_SUM.
        shape: of the tensor, for verbs where all ranks pass one of the same shape.
        sends: elements to each group rank, for verbs that exchange pieces.
        receives: elements expected from each group rank, likewise.
    """

    group: str
    uid: str
    sequence: int
    verb: str
    wire: dtypes.WireType | None = None
    reducer: reducers.Reducer | None = None
    root: int | None = None
    factor: float = 1.0
    shape: tuple[int, ...] | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Envelope:
    """One rank's envelope as it arrived."""

    group: bytes
    sequence: int
    verb: int
    dtype: int
    reducer: int
    root: int
    factor: float
    shape: tuple[int, ...] | None
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    is_inline: bool
    others: frozenset[bytes]
    payload: memoryview = field(repr=False)

    def describe(self) -> str:
        """The call in the user's words, e.g. ``all_reduce SUM float32 (3, 5)``."""
        words = [VERBS[self.verb]]
        if self.reducer:
            words.append(reducers.NAMES_BY_CODE[self.reducer])
        if self.factor != 1.0:
            words.append(f"factor {self.factor:g}")
        if self.dtype:
            words.append(dtypes.NAMES_BY_CODE[self.dtype])
        if self.shape is not None:
            words.append(str(self.shape))
        if self.sends:
            words.append(f"sends {list(self.sends)} expects {list(self.receives)}")
        if self.root >= 0:
            words.append(f"root {self.root}")
        return " ".join(words)


def envelope_size(num_ranks: int) -> int:
    """Bytes of an envelope in a group of `num_ranks`."""
    return _HEADER.size + 16 * num_ranks + INLINE_BYTES


def pack(
    signature: Signature, num_ranks: int, payload: bytes | None, others: Sequence[bytes] = ()
) -> bytearray:
    """Write an envelope.

    Args:
        signature: of the call.
        num_ranks: of the lane.
        payload: what this rank sends, or None if it is larger than fits.
        others: digests of other groups of the same ranks that have a call waiting here.
    """
    wire, reducer, shape = signature.wire, signature.reducer, signature.shape
    dims = -1 if shape is None else len(shape)
    if dims > _MAX_DIMS:  # long shapes agree if their sizes and a digest do
        assert shape is not None
        digest = int.from_bytes(hashlib.sha256(repr(shape).encode()).digest()[:7], "little")
        total = 1
        for size in shape:
            total *= size
        shape, dims = (total, digest), 2
    padded = (*(shape or ()), *([0] * _MAX_DIMS))[:_MAX_DIMS]
    buffer = bytearray(envelope_size(num_ranks))
    _HEADER.pack_into(
        buffer,
        0,
        signature.sequence,
        0 if payload is None else 1,
        group_digest(signature.uid),
        VERBS.index(signature.verb),
        wire.code if wire else 0,
        reducer.code if reducer else 0,
        len(signature.sends) and 1,
        -1 if signature.root is None else signature.root,
        dims & 0xFFFFFFFF,
        signature.factor,
        *padded,
        0 if payload is None else len(payload),
        b"".join(others[:MAX_OTHERS]),
    )
    if signature.sends:
        struct.pack_into(
            f"<{2 * num_ranks}q", buffer, _HEADER.size, *signature.sends, *signature.receives
        )
    if payload:
        start = _HEADER.size + 16 * num_ranks
        buffer[start : start + len(payload)] = payload
    return buffer


def unpack(buffer: memoryview, num_ranks: int) -> Envelope:
    """Read an envelope; its payload is a view of `buffer`."""
    (sequence, is_inline, group, verb, dtype, reducer, sized, root, dims, factor, *rest) = (
        _HEADER.unpack_from(buffer, 0)
    )
    shape, (payload_bytes, others) = rest[:_MAX_DIMS], rest[_MAX_DIMS:]
    table: tuple[int, ...] = ()
    if sized:
        table = struct.unpack_from(f"<{2 * num_ranks}q", buffer, _HEADER.size)
    start = _HEADER.size + 16 * num_ranks
    return Envelope(
        group=group,
        sequence=sequence,
        verb=verb,
        dtype=dtype,
        reducer=reducer,
        root=root,
        factor=factor,
        shape=None if dims == 0xFFFFFFFF else tuple(shape[:dims]),
        sends=table[:num_ranks],
        receives=table[num_ranks:],
        is_inline=bool(is_inline),
        others=frozenset(_digests(others)),
        payload=buffer[start : start + payload_bytes],
    )


def _digests(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed), 8):
        if packed[start : start + 8] == bytes(8):
            return
        yield packed[start : start + 8]


def choose_group(envelopes: Sequence[Envelope]) -> bytes | None:
    """Digest of the group whose call is next, where ranks stand at calls of different groups.

    One of which a call waits on every rank; the same on all ranks. None if there is none yet.
    """
    waiting = [envelope.others | {envelope.group} for envelope in envelopes]
    everywhere: frozenset[bytes] = frozenset.intersection(*waiting)
    wanted = [envelope.group for envelope in envelopes if envelope.group in everywhere]
    return next(iter([*wanted, *sorted(everywhere)]), None)


@functools.cache
def group_digest(uid: str) -> bytes:
    """Eight bytes that stand for a group."""
    return hashlib.sha256(uid.encode()).digest()[:8]


def check_agreement(
    signature: Signature, envelopes: Sequence[Envelope], ranks: Sequence[int]
) -> None:
    """See that all ranks called the same; the outcome is the same on every rank.

    Args:
        signature: this rank's.
        envelopes: everybody's, by group rank.
        ranks: global rank of each group rank, for the message.

    Raises:
        MismatchError: names who called what.
    """
    calls: dict[tuple[object, ...], list[int]] = {}
    for rank, envelope in zip(ranks, envelopes, strict=True):
        calls.setdefault(_what_must_agree(envelope), []).append(rank)
    if len(calls) > 1:
        raise MismatchError(_describe_disagreement(signature, envelopes, ranks, calls))
    for sender, envelope in enumerate(envelopes):
        for receiver, count in enumerate(envelope.sends):
            expected = envelopes[receiver].receives[sender]
            if count != expected:
                raise MismatchError(
                    f"{signature.verb} #{signature.sequence} of group {signature.group!r}: rank "
                    f"{ranks[sender]} sends {count} elements to rank {ranks[receiver]}, which "
                    f"expects {expected} from it. Pass sizes that fit on both; nothing was sent."
                )


def _what_must_agree(envelope: Envelope) -> tuple[object, ...]:
    # Not the sequence number: it counts a rank's own calls, so it says no more than the order in
    # which the envelopes meet; and callbacks of futures may be numbered differently on each rank.
    return (
        envelope.group,
        envelope.verb,
        envelope.dtype,
        envelope.reducer,
        envelope.root,
        struct.pack("<d", envelope.factor),  # by its bits: NaN agrees with itself
        envelope.shape,
    )


def _describe_disagreement(
    signature: Signature,
    envelopes: Sequence[Envelope],
    ranks: Sequence[int],
    calls: dict[tuple[object, ...], list[int]],
) -> str:
    by_rank = dict(zip(ranks, envelopes, strict=True))
    own_group = group_digest(signature.uid)
    lines = []
    for callers in calls.values():
        envelope = by_rank[callers[0]]
        where = "" if envelope.group == own_group else " in another group with the same ranks"
        who = f"rank {callers[0]}" if len(callers) == 1 else f"ranks {callers}"
        lines.append(f"{who} called {envelope.describe()} (#{envelope.sequence}{where})")
    return (
        f"the ranks of group {signature.group!r} called different collectives: "
        f"{'; '.join(lines)}. All must call the same in the same order; nothing was sent."
    )
