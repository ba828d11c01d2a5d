"""The operations a lane runs: each says what it sends, and takes in what the others sent.

Two kinds serve all verbs. A Whole takes one tensor of the same shape on every rank (all_reduce,
reduce, broadcast). An Exchange sends a piece to each rank and takes a piece from each (the rest).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  gives numpy the narrow floats' names
import numpy as np
import torch

from tpu_dist.collectives.border import carry, copy_out, flat, is_remote, raw, to_array
from tpu_dist.collectives.chunks import Chunk, chunks, pieces
from tpu_dist.collectives.dtypes import WIRE_TYPES, WireType, moving_wire, wire_type
from tpu_dist.collectives.envelope import INLINE_BYTES, Envelope, Signature
from tpu_dist.collectives.forms import arrival_step, num_steps
from tpu_dist.collectives.plans import Plan, choose_plan
from tpu_dist.collectives.programs import Array, Programs
from tpu_dist.collectives.reducers import Reducer, combine, finish
from tpu_dist.runtime.device.calls import filling
from tpu_dist.runtime.device.tensors import is_on_device

_BYTES = WIRE_TYPES[torch.uint8]


class Members(Protocol):
    """What an operation needs to know of the lane that runs it."""

    programs: Programs

    @property
    def table(self) -> str:
        """Platform whose table of plans is used."""

    @property
    def device(self) -> Any:
        """This process's device."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the lane."""

    @property
    def index(self) -> int:
        """Place of this process among the ranks."""


class Operation(Protocol):
    """One collective, as this rank takes part in it."""

    signature: Signature

    def payload(self, *, always: bool = False) -> bytes | None:
        """What this rank sends, if it is small, or if it must go so; else None."""

    def finish_inline(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """Take the result from the others' envelopes; called when all payloads are in them."""

    def run(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """Move the payload by programs; called when somebody's was not."""


class _Destination:
    """A tensor of the caller's, filled in row-major order; strided ones through a buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # .data: no autograd, and no new version; as other backends do.
        self._tensor = tensor.data
        direct = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._buffer = (
            self._tensor
            if direct
            else torch.empty_like(
                self._tensor.resolve_conj(), memory_format=torch.contiguous_format
            )
        )
        self.flat = (
            self._buffer.view(-1)
            if tensor.numel()
            else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        )

    def close(self) -> None:
        """Bring the buffer, if there is one, into the tensor."""
        if self._buffer is not self._tensor:
            self._tensor.copy_(self._buffer)


def _chunks(
    signature: Signature, num_elements: int, plan: Plan, members: Members
) -> Iterator[Chunk]:
    """Cut what each program moves; on the device as little as can be: every cut is a copy there."""
    if signature.place != "tpu":
        return chunks(num_elements, plan.chunk_elements)
    assert signature.wire is not None
    rounded = members.programs.exact_sizes.rounding((plan.form.name, signature.wire.name))
    largest = max(1, num_elements) if members.table == "cpu" else plan.chunk_elements
    return chunks(num_elements, largest, rounded)


def _cut(payload: torch.Tensor | None, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """The chunk of a flat payload, padded to the program's size; anything where there is none."""
    if payload is None or not chunk.length or chunk.start >= payload.numel():
        device = None if payload is None else payload.device
        return torch.zeros(chunk.size, dtype=dtype, device=device)  # its receiver drops it
    if chunk.length == chunk.size == payload.numel():
        return payload
    piece = payload[chunk.start : chunk.start + chunk.length]
    if piece.numel() == chunk.size:
        return piece
    padded = torch.zeros(chunk.size, dtype=dtype, device=payload.device)
    padded[: piece.numel()] = piece
    return padded


def _scaled(payload: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return payload
    accumulate = wire_type(payload.dtype).accumulate
    wide = payload if accumulate is None else payload.to(getattr(torch, accumulate))
    return (wide * factor).to(payload.dtype)


def _as_bytes(payload: torch.Tensor) -> bytes:
    return raw(payload).cpu().numpy().tobytes()


@dataclass(slots=True, kw_only=True)
class Whole:
    """all_reduce, reduce and broadcast of one tensor, in place.

    Attributes:
        keeps: whether this rank takes the result: in a reduce the root alone, in a broadcast all
            but the root.
    """

    signature: Signature
    tensor: torch.Tensor
    keeps: bool = True
    _flat: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._flat = _scaled(flat(self.tensor), self.signature.factor)

    @property
    def _wire(self) -> WireType:
        assert self.signature.wire is not None
        return self.signature.wire

    def payload(self, *, always: bool = False) -> bytes | None:
        """See Operation."""
        if not always and (self._flat.nbytes > INLINE_BYTES or is_remote(self._flat)):
            return None
        return _as_bytes(self._flat)

    def finish_inline(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """See Operation."""
        if not self.keeps or not self._flat.numel():
            return
        reducer = self.signature.reducer
        if reducer is None:
            assert self.signature.root is not None
            result = _from_payload(envelopes[self.signature.root].payload, self.tensor.dtype)
        else:
            result = _reduce_rows([e.payload for e in envelopes], self._wire, reducer)
        destination = _Destination(self.tensor)
        destination.flat.copy_(result)
        destination.close()

    def run(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """See Operation."""
        reducer = self.signature.reducer
        if reducer is None and members.num_ranks == 1:
            return
        if reducer is None:
            verb, wire = "broadcast", _moving(self._wire, members, by_sums=True)
        else:
            verb, wire = "all_reduce", self._wire
        payload = carry(self._flat, wire)
        plan = choose_plan(
            members.table,
            verb,
            num_elements=payload.numel(),
            element_bytes=payload.element_size(),
            num_ranks=members.num_ranks,
            wire=wire,
            reducer=reducer,
        )
        if self._fits_one_program(plan, payload.numel(), members):
            self._run_as_it_is(plan, members)
            return
        destination = _Destination(self.tensor)
        target = destination.flat.view(payload.dtype)
        if plan.form.name == "hop":
            self._pass_on(payload, target, plan, members)
        elif plan.form.pieces:
            self._run_in_pieces(payload, target, plan, members)
        else:
            self._run_whole(payload, target, plan, wire, members)
        if self.keeps:
            destination.close()

    def _fits_one_program(self, plan: Plan, num_elements: int, members: Members) -> bool:
        """Whether the tensor's array goes into a program, and its output to the tensor, as is."""
        signature = self.signature
        if signature.place != "tpu" or plan.form.pieces:
            return False
        what = (plan.form.name, self._wire.name, signature.shape)
        return bool(num_elements) and members.programs.exact_sizes.admit(what)

    def _run_as_it_is(self, plan: Plan, members: Members) -> None:
        shape = self.signature.shape or (1,)
        array = to_array(self._flat.view(shape), members.device)
        size, reducer = self._flat.numel(), self.signature.reducer
        if plan.form.name == "hop":
            array = self._hop(array, plan, size, self._wire, members, shape)
        else:
            root = self.signature.root if reducer is None else None
            program = members.programs.get(
                plan.form, size=size, wire=self._wire, reducer=reducer, root=root, shape=shape
            )
            (array,) = program([array])
        if self.keeps:
            destination = _Destination(self.tensor)
            copy_out(array, destination.flat, members.device)
            destination.close()

    def _pass_on(
        self, payload: torch.Tensor, target: torch.Tensor, plan: Plan, members: Members
    ) -> None:
        """A broadcast, chunk by chunk."""
        for chunk in _chunks(self.signature, payload.numel(), plan, members):
            held = to_array(_cut(payload, chunk, payload.dtype), members.device)
            held = self._hop(held, plan, chunk.size, _BYTES, members)
            if self.keeps:
                _store(target, chunk, held, members)

    def _hop(
        self,
        held: Array,
        plan: Plan,
        size: int,
        wire: WireType,
        members: Members,
        shape: tuple[int, ...] | None = None,
    ) -> Array:
        """A broadcast, step by step; a rank that holds nothing yet puts in whatever it has."""
        root, num_ranks = self.signature.root, members.num_ranks
        assert root is not None
        arrives = arrival_step((members.index - root) % num_ranks)
        for step in range(num_steps(num_ranks)):
            program = members.programs.get(
                plan.form, size=size, wire=wire, root=root, step=step, shape=shape
            )
            (output,) = program([held])
            if step == arrives:
                held = output
        return held

    def _run_whole(
        self,
        payload: torch.Tensor,
        target: torch.Tensor,
        plan: Plan,
        wire: WireType,
        members: Members,
    ) -> None:
        """An all_reduce, or a broadcast, in one step; a reduce is one that the root keeps."""
        reducer = self.signature.reducer
        root = self.signature.root if reducer is None else None
        for chunk in _chunks(self.signature, payload.numel(), plan, members):
            program = members.programs.get(
                plan.form, size=chunk.size, wire=wire, reducer=reducer, root=root
            )
            (output,) = program([to_array(_cut(payload, chunk, payload.dtype), members.device)])
            if self.keeps:
                _store(target, chunk, output, members)

    def _run_in_pieces(
        self, payload: torch.Tensor, target: torch.Tensor, plan: Plan, members: Members
    ) -> None:
        """An all_reduce of which each rank reduces a piece."""
        me, size, reducer = members.index, members.num_ranks, self.signature.reducer
        for cut in pieces(payload.numel(), size, plan.chunk_elements):
            program = members.programs.get(
                plan.form, size=cut[0].size, wire=self._wire, reducer=reducer
            )
            forwards = [cut[(me + k) % size] for k in range(size)]
            outputs = program(
                [
                    to_array(_cut(payload, piece, payload.dtype), members.device)
                    for piece in forwards
                ]
            )
            if self.keeps:
                for k, output in enumerate(outputs):
                    _store(target, cut[(me - k) % size], output, members)


@dataclass(slots=True, kw_only=True)
class Exchange:
    """The verbs that move pieces between pairs of ranks.

    Attributes:
        sends: the tensor for each group rank, None where there is none; the same tensor for all in
        a
            gather.
        receives: the tensor to fill from each group rank, None where there is none.
        result: of a reduce_scatter: what the arriving pieces are combined into.
    """

    signature: Signature
    sends: Sequence[torch.Tensor | None]
    receives: Sequence[torch.Tensor | None]
    result: torch.Tensor | None = None
    _flats: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        flats: dict[int, torch.Tensor] = {}  # one flattening for a tensor that goes to everybody
        for tensor in self.sends:
            if tensor is not None and id(tensor) not in flats:
                flats[id(tensor)] = _scaled(flat(tensor), self.signature.factor)
        self._flats = [None if t is None else flats[id(t)] for t in self.sends]

    @property
    def _is_shared(self) -> bool:
        """Whether everybody is sent the same tensor."""
        return self.signature.verb in ("all_gather", "gather")

    def payload(self, *, always: bool = False) -> bytes | None:
        """See Operation."""
        own = [piece for piece in self._flats if piece is not None]
        if self._is_shared:
            own = own[:1]
        is_large = sum(piece.nbytes for piece in own) > INLINE_BYTES
        if not always and (is_large or any(map(is_remote, own))):
            return None
        return b"".join(_as_bytes(piece) for piece in own)

    def finish_inline(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """See Operation."""
        me, wire = members.index, self.signature.wire
        assert wire is not None
        arrived = []
        for envelope in envelopes:
            start = 0 if self._is_shared else sum(envelope.sends[:me]) * wire.carrier.itemsize
            arrived.append(envelope.payload[start:][: envelope.sends[me] * wire.carrier.itemsize])
        if self.result is not None:
            if self.result.numel():
                assert self.signature.reducer is not None
                fill(self.result, _reduce_rows(arrived, wire, self.signature.reducer))
            return
        for tensor, row in zip(self.receives, arrived, strict=True):
            if tensor is not None:
                fill(tensor, _from_payload(row, tensor.dtype))

    def run(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """See Operation."""
        largest = max(max(envelope.sends) for envelope in envelopes)
        if self.result is None:
            self._move(largest, members)
        else:
            self._reduce_scatter(largest, members)

    def _move(self, largest: int, members: Members) -> None:
        me, size = members.index, members.num_ranks
        assert self.signature.wire is not None
        by_sums = self.signature.verb == "scatter"
        wire, seen = self.signature.wire, _as_it_is
        if self.signature.place != "tpu":  # else its bits are seen to in the program
            wire = _moving(self.signature.wire, members, by_sums=by_sums)
            seen = functools.partial(carry, wire=wire)
        sends = [None if piece is None else seen(piece) for piece in self._flats]
        destinations = [None if t is None else _Destination(t) for t in self.receives]
        targets = [None if d is None else seen(d.flat) for d in destinations]
        own_source, own_target = sends[me], targets[me]
        if own_target is not None and own_source is not None and not _same(own_target, own_source):
            own_target.copy_(own_source)
        if size > 1:
            self._move_between_ranks(largest, sends, targets, wire, members)
        for destination in destinations:
            if destination is not None:
                destination.close()

    def _move_between_ranks(
        self,
        largest: int,
        sends: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        wire: WireType,
        members: Members,
    ) -> None:
        me, size, root = members.index, members.num_ranks, self.signature.root
        assert self.signature.wire is not None
        on_device = self.signature.place == "tpu"
        item = wire.carrier.itemsize
        num_elements = largest * self.signature.wire.carrier.itemsize // item
        plan = choose_plan(
            members.table,
            self.signature.verb,
            num_elements=num_elements,
            element_bytes=item,
            num_ranks=size,
            wire=wire,
        )
        form = plan.form
        dtype = getattr(torch, wire.name) if on_device else wire.carrier
        order = [(me + k) % size for k in range(1, size)] if form.relative else list(range(size))
        backwards = [(me - k) % size for k in range(1, size)] if form.relative else order
        if form.from_root:
            assert root is not None
            backwards = [root]
        sources = order if form.pieces else [_first_receiver(sends)]
        # An all_gather serves a gather too: it knows no root.
        rooted = root if form.verb != "all_gather" else None
        for chunk in _chunks(self.signature, num_elements, plan, members):
            program = members.programs.get(
                form,
                size=chunk.size,
                wire=wire,
                root=rooted,
                shape=(chunk.size,) if on_device else None,
            )
            operands = [
                to_array(_cut(sends[rank], chunk, dtype), members.device) for rank in sources
            ]
            outputs = program(operands)
            for rank, output in zip(backwards, outputs, strict=True):
                target = targets[rank]
                if target is not None and rank != me:
                    _store(target, chunk, output, members)

    def _reduce_scatter(self, largest: int, members: Members) -> None:
        me, size = members.index, members.num_ranks
        wire, reducer = self.signature.wire, self.signature.reducer
        assert wire is not None and reducer is not None and self.result is not None
        pieces = [None if piece is None else carry(piece, wire) for piece in self._flats]
        destination = _Destination(self.result)
        target = destination.flat.view(wire.carrier)
        plan = choose_plan(
            members.table,
            "reduce_scatter",
            num_elements=largest,
            element_bytes=target.element_size(),
            num_ranks=size,
            wire=wire,
            reducer=reducer,
        )
        order = [(me + k) % size if plan.form.relative else k for k in range(size)]
        for chunk in _chunks(self.signature, largest, plan, members):
            program = members.programs.get(plan.form, size=chunk.size, wire=wire, reducer=reducer)
            operands = [
                to_array(_cut(pieces[rank], chunk, wire.carrier), members.device) for rank in order
            ]
            (output,) = program(operands)
            _store(target, chunk, output, members)
        destination.close()


def _moving(wire: WireType, members: Members, *, by_sums: bool) -> WireType:
    """As what a payload crosses that is only moved: as bytes, all dtypes share their programs."""
    return _BYTES if members.table == "cpu" else moving_wire(wire, by_sums=by_sums)


def _first_receiver(sends: Sequence[torch.Tensor | None]) -> int:
    """The first rank that something is sent to (the same goes to all); 0 if there is none."""
    return next((rank for rank, piece in enumerate(sends) if piece is not None), 0)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return not is_on_device(first) and first.data_ptr() == second.data_ptr()


def _from_payload(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if not payload.nbytes:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy flat `values`, which a call has brought, into a tensor of the caller's."""
    with filling():
        destination = _Destination(tensor)
        destination.flat.copy_(values)
        destination.close()


def _store(target: torch.Tensor, chunk: Chunk, output: Array, members: Members) -> None:
    """Copy a program's output into its place, which may be shorter at the end, or empty."""
    place = target[chunk.start : chunk.start + chunk.length]
    copy_out(output, place, members.device)


def _reduce_rows(rows: Sequence[memoryview], wire: WireType, reducer: Reducer) -> torch.Tensor:
    """Combine what arrived in envelopes; too little for a program to be worth its call."""
    arrays = [np.frombuffer(row, dtype=wire.name) for row in rows]
    with np.errstate(all="ignore"):  # overflow is the user's own, and silent as in a program
        total = finish(reducer, wire, combine(reducer, wire, arrays, np), len(arrays), np)
    carried = torch.from_numpy(np.ascontiguousarray(total).view(np.uint8))
    return carried.view(getattr(torch, wire.name))


@dataclass(slots=True, kw_only=True)
class Barrier:
    """Nothing to move: the envelopes themselves are the barrier."""

    signature: Signature

    def payload(self, *, always: bool = False) -> bytes | None:
        """See Operation."""
        return b""

    def finish_inline(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """See Operation."""

    def run(self, envelopes: Sequence[Envelope], members: Members) -> None:
        """See Operation."""
        raise AssertionError("a barrier has no payload")
