"""The envelope: what each rank says of its call before any payload moves.

Every collective begins with an all-gather of envelopes. So ranks that call different things find
out, on every rank and by name, instead of hanging, crashing (gloo inside XLA ends the process when
two sizes differ) or summing apples and pears; small payloads travel inside it, and are done.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpu_dist.collectives import dtypes, reducers
from tpu_dist.topology.errors import MismatchError

INLINE_BYTES = 4096  # payload that fits into an envelope

# An envelope is a head, the call (what must agree), digests of other groups that wait, the table of
# sends and receives if the verb has one, and the payload if it is small.
_HEAD = struct.Struct("<QHHBB")  # sequence, bytes of the call, others, has a table, is inline
# Of the call: group, verb, dtype, reducer, place, root, factor, dims; then the shape.
_CALL = struct.Struct("<8sBBBBidh")

# Where a rank's tensors may be; a program's operands are made otherwise for each.
PLACES = (None, "cpu", "tpu")

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
        place: device type of the tensors; None where it does not matter.
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
    place: str | None = None
    shape: tuple[int, ...] | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Envelope:
    """One rank's envelope as it arrived.

    Attributes:
        call: what must agree between the ranks, packed.
        sequence: number of the call in its group on that rank.
        sends: elements to each group rank, for verbs that exchange pieces.
        receives: elements expected from each group rank, likewise.
        is_inline: whether `payload` is all that the rank sends.
        others: digests of the other groups that have a call waiting there.
    """

    call: bytes
    sequence: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    is_inline: bool
    others: frozenset[bytes]
    payload: memoryview = field(repr=False)

    @property
    def group(self) -> bytes:
        """Digest of the group that is called."""
        return self.call[:8]

    def describe(self) -> str:
        """The call in the user's words, e.g. ``all_reduce SUM float32 (3, 5)``."""
        _, verb, dtype, reducer, _, root, factor, dims = _CALL.unpack_from(self.call)
        words = [VERBS[verb]]
        if reducer:
            words.append(reducers.NAMES_BY_CODE[reducer])
        if factor != 1.0:
            words.append(f"factor {factor:g}")
        if dtype:
            words.append(dtypes.NAMES_BY_CODE[dtype])
        if dims >= 0:
            words.append(str(struct.unpack_from(f"<{dims}q", self.call, _CALL.size)))
        if self.sends:
            words.append(f"sends {list(self.sends)} expects {list(self.receives)}")
        if root >= 0:
            words.append(f"root {root}")
        return " ".join(words)

    @property
    def place(self) -> str | None:
        """Where the rank's tensors are."""
        return PLACES[_CALL.unpack_from(self.call)[4]]


def pack(signature: Signature, payload: bytes | None, others: Sequence[bytes] = ()) -> bytes:
    """Write an envelope.

    Args:
        signature: of the call.
        payload: what this rank sends, or None if it is larger than fits.
        others: digests of other groups of the same ranks that have a call waiting here.
    """
    call = _pack_call(
        signature.uid,
        signature.verb,
        signature.wire,
        signature.reducer,
        signature.place,
        signature.root,
        struct.pack("<d", signature.factor),  # by its bits: NaN agrees with itself
        signature.shape,
    )
    table = signature.sends + signature.receives
    parts = [
        _HEAD.pack(signature.sequence, len(call), len(others), bool(table), payload is not None),
        call,
        *others,
    ]
    if table:
        parts.append(struct.pack(f"<{len(table)}q", *table))
    if payload:
        parts.append(payload)
    return b"".join(parts)


@functools.lru_cache(maxsize=1024)  # a training step makes the same calls again and again
def _pack_call(
    uid: str,
    verb: str,
    wire: dtypes.WireType | None,
    reducer: reducers.Reducer | None,
    place: str | None,
    root: int | None,
    factor: bytes,
    shape: tuple[int, ...] | None,
) -> bytes:
    return _CALL.pack(
        group_digest(uid),
        VERBS.index(verb),
        wire.code if wire else 0,
        reducer.code if reducer else 0,
        PLACES.index(place),
        -1 if root is None else root,
        *struct.unpack("<d", factor),
        -1 if shape is None else len(shape),
    ) + struct.pack(f"<{len(shape or ())}q", *(shape or ()))


def unpack(block: bytes, num_ranks: int) -> Envelope:
    """Read an envelope; its payload is a view of `block`."""
    sequence, call_bytes, num_others, has_table, is_inline = _HEAD.unpack_from(block)
    others = _HEAD.size + call_bytes
    table = others + 8 * num_others
    payload = table + 16 * num_ranks * has_table
    counts = struct.unpack_from(f"<{2 * num_ranks}q", block, table) if has_table else ()
    return Envelope(
        call=block[_HEAD.size : others],
        sequence=sequence,
        sends=counts[:num_ranks],
        receives=counts[num_ranks:],
        is_inline=bool(is_inline),
        others=frozenset(block[k : k + 8] for k in range(others, table, 8)),
        payload=memoryview(block)[payload:],
    )


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
    calls: dict[bytes, list[int]] = {}
    for rank, envelope in zip(ranks, envelopes, strict=True):
        # Not the sequence number: it counts a rank's own calls, so it says no more than the order
        # in which the envelopes meet; and callbacks of futures may be numbered differently on each.
        calls.setdefault(envelope.call, []).append(rank)
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


def _describe_disagreement(
    signature: Signature,
    envelopes: Sequence[Envelope],
    ranks: Sequence[int],
    calls: dict[bytes, list[int]],
) -> str:
    by_rank = dict(zip(ranks, envelopes, strict=True))
    own_group = group_digest(signature.uid)
    lines = []
    places_differ = len({envelope.place for envelope in envelopes} - {None}) > 1
    for callers in calls.values():
        envelope = by_rank[callers[0]]
        where = "" if envelope.group == own_group else " in another group with the same ranks"
        if places_differ and envelope.place is not None:
            where = f" with tensors on {envelope.place!r}{where}"
        who = f"rank {callers[0]}" if len(callers) == 1 else f"ranks {callers}"
        lines.append(f"{who} called {envelope.describe()} (#{envelope.sequence}{where})")
    return (
        f"the ranks of group {signature.group!r} called different collectives: "
        f"{'; '.join(lines)}. All must call the same in the same order; nothing was sent."
    )
