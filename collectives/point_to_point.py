"""Sends and receives: matched over the channel, small ones carried by it, large ones by a program.

A sender offers a message to its receiver, which matches it with a posted receive, by group, source
and tag, in order of arrival. A message of up to EAGER_BYTES travels inside its offer. A larger one
is moved by a program of the two devices; the lower rank of the two decides the order of such
programs, so both queue the same one first, and no ring of sends can wait for itself. What a rank
sends itself is copied from the one tensor to the other.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpu_dist.collectives.border import flat, is_remote, raw
from tpu_dist.collectives.diagnosis import describe_absent, find_absent
from tpu_dist.collectives.dtypes import NAMES_BY_CODE, wire_type
from tpu_dist.collectives.engine import Engine
from tpu_dist.collectives.envelope import Signature
from tpu_dist.collectives.operations import Exchange, fill
from tpu_dist.collectives.task import Task
from tpu_dist.runtime.channel import Meta
from tpu_dist.topology.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)

EAGER_BYTES = 256 << 10


@dataclass(slots=True)
class _Send:
    identity: int
    task: Task
    payload: torch.Tensor  # flat
    receiver: int


@dataclass(slots=True)
class _Receive:
    task: Task
    tensor: torch.Tensor
    group: str
    source: int | None  # global rank; None: from anybody
    tag: int
    found: Callable[[int], None]  # told the source's global rank
    offer: _Offer | None = None


@dataclass(slots=True)
class _Offer:
    source: int
    identity: int
    group: str
    tag: int
    dtype: int
    count: int
    body: (
        bytes | torch.Tensor | None
    )  # the tensor that a rank sends itself; None: a program brings it

    def describe(self) -> str:
        return f"{self.count} elements of {NAMES_BY_CODE[self.dtype]}"

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The elements that came with the offer; there must be some."""
        assert self.body is not None
        if isinstance(self.body, torch.Tensor):
            return self.body
        return torch.frombuffer(bytearray(self.body), dtype=dtype)


class PointToPoint:
    """The messages of this process, of all its groups. Owner of their tasks until they move."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._channel = engine.runtime.channel
        self._rank = engine.runtime.rank
        self._lock = threading.RLock()
        self._identities = itertools.count(1)
        self._sends: dict[int, _Send] = {}
        self._posted: list[_Receive] = []
        self._offers: list[_Offer] = []
        self._matched: dict[tuple[int, int], _Receive] = {}  # by (source, identity)
        self._handlers = {
            "offer": self._on_offer,
            "match": self._on_match,
            "transfer": self._on_transfer,
            "taken": self._on_taken,
            "refused": self._on_refused,
            "withdrawn": self._on_withdrawn,
        }
        for kind, handler in self._handlers.items():
            self._channel.on(kind, handler)
        self._channel.on_lost(self._on_lost)

    def send(self, task: Task, tensor: torch.Tensor, receiver: int, tag: int) -> None:
        """Offer `tensor` to the global rank `receiver`; the task ends when it has been taken."""
        payload = flat(tensor)
        send = _Send(next(self._identities), task, payload, receiver)
        meta = {
            "id": send.identity,
            "group": task.call.uid,
            "tag": tag,
            "dtype": wire_type(tensor.dtype).code,
            "count": tensor.numel(),
            "eager": payload.nbytes <= EAGER_BYTES and not is_remote(payload),
        }
        with self._lock:
            self._sends[send.identity] = send
        self._engine.watch(task)
        if receiver == self._rank:
            self._offered(_offer(receiver, meta, payload))
            return
        body = raw(payload).cpu().numpy().tobytes() if meta["eager"] else b""
        try:
            self._channel.send(receiver, "offer", meta, body)
        except PeerLostError as error:
            self.give_up(task, PeerLostError(f"{task.call} failed: {error}"))

    def receive(
        self,
        task: Task,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        found: Callable[[int], None],
    ) -> None:
        """Post a receive into `tensor` from global rank `source`, or from anybody if None."""
        receive = _Receive(task, tensor, task.call.uid, source, tag, found)
        self._engine.watch(task)
        with self._lock:
            offer = next((offer for offer in self._offers if _fits(receive, offer)), None)
            if offer is None:
                self._posted.append(receive)
            else:
                self._offers.remove(offer)
        if offer is not None:
            self._match(receive, offer)
        elif source not in (None, self._rank):
            try:
                self._channel.watch(source)
            except PeerLostError as error:
                self.give_up(task, PeerLostError(f"{task.call} failed: {error}"))

    # --- Owner

    def expire(self, task: Task) -> None:
        """See Owner."""
        with self._lock:
            receive = next((r for r in self._posted if r.task is task), None)
            waiting = [
                f"{offer.describe()} with tag {offer.tag} from rank {offer.source}"
                for offer in self._offers
                if offer.group == task.call.uid
            ]
        seconds = f"{task.timeout.total_seconds():g} s"
        absent = find_absent(self._channel, task.call, self._rank)
        if absent:
            why = describe_absent(absent)
        elif receive is None:
            why = "its receiver lives, but has posted no receive that matches."
        else:
            why = "nobody has sent a message that matches. " + (
                f"Others wait: {'; '.join(waiting)}." if waiting else "No other message waits."
            )
        text = f"{task.call} was not finished within its timeout of {seconds}: {why}"
        self.give_up(task, CollectiveTimeoutError(text))

    def give_up(self, task: Task, error: CollectiveError) -> None:
        """See Owner."""
        with self._lock:
            self._posted = [r for r in self._posted if r.task is not task]
            withdrawn = [send for send in self._sends.values() if send.task is task]
            for send in withdrawn:
                del self._sends[send.identity]
        task.settle(error)
        for send in withdrawn:
            self._tell(send.receiver, "withdrawn", {"id": send.identity})

    # --- matching, on any thread

    def _match(self, receive: _Receive, offer: _Offer) -> None:
        tensor = receive.tensor
        if (wire_type(tensor.dtype).code, tensor.numel()) != (offer.dtype, offer.count):
            error = MismatchError(
                f"{receive.task.call} got a message of {offer.describe()} from rank "
                f"{offer.source}, but was given room for {tensor.numel()} elements of "
                f"{str(tensor.dtype).removeprefix('torch.')}. Send and receive the same."
            )
            receive.task.settle(error)
            self._tell(offer.source, "refused", {"id": offer.identity, "text": str(error)})
            return
        receive.found(offer.source)
        if offer.body is not None:
            if offer.count:
                fill(tensor, offer.values(tensor.dtype))
            receive.task.settle()
            self._tell(offer.source, "taken", {"id": offer.identity})
            return
        receive.offer = offer
        key = (offer.source, offer.identity)
        if self._rank < offer.source:
            with self._lock:  # what is told and what is queued must come in one order
                self._tell(offer.source, "transfer", {"id": offer.identity, "sender": offer.source})
                self._queue_receive(receive)
        else:
            with self._lock:
                self._matched[key] = receive
            self._tell(offer.source, "match", {"id": offer.identity})

    def _queue_receive(self, receive: _Receive) -> None:
        offer = receive.offer
        assert offer is not None
        self._queue(receive.task, offer.identity, (offer.source, self._rank), receive.tensor)

    def _queue(
        self,
        task: Task,
        identity: int,
        ends: tuple[int, int],
        tensor: torch.Tensor,
    ) -> None:
        """Put a transfer from ends[0] to ends[1] on the two ranks' lane.

        In a lane's ranks the higher one stands first: groups have their members in ascending
        order, so no group shares this lane.
        """
        sender, receiver = ends
        ranks = tuple(sorted(ends, reverse=True))
        root = ranks.index(sender)
        sends: list[torch.Tensor | None] = [None, None]
        receives: list[torch.Tensor | None] = [None, None]
        if sender == self._rank:
            sends[1 - root] = tensor
        else:
            receives[root] = tensor
        operation = Exchange(
            signature=Signature(
                group=f"messages of rank {sender} to rank {receiver}",
                uid="messages",
                sequence=identity,
                verb="transfer",
                wire=wire_type(tensor.dtype),
                root=root,
                sends=tuple(0 if piece is None else piece.numel() for piece in sends),
                receives=tuple(0 if piece is None else piece.numel() for piece in receives),
            ),
            sends=sends,
            receives=receives,
        )
        lane = self._engine.lane(ranks)
        task.owner = lane
        lane.submit(task, [operation])

    # --- what peers say, on the channel's thread

    def _on_offer(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        self._offered(_offer(rank, meta, body if meta["eager"] else None))
        return None

    def _offered(self, offer: _Offer) -> None:
        with self._lock:
            receive = next((r for r in self._posted if _fits(r, offer)), None)
            if receive is None:
                self._offers.append(offer)
            else:
                self._posted.remove(receive)
        if receive is not None:
            self._match(receive, offer)

    def _on_match(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        """The receiver, a higher rank, has matched our offer: set its place in the order."""
        with self._lock:
            send = self._sends.pop(meta["id"], None)
            if send is not None:
                self._tell(rank, "transfer", {"id": send.identity, "sender": self._rank})
                self._queue_send(send)
        return None

    def _on_transfer(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        """The lower rank has queued a transfer: queue our end of it."""
        with self._lock:
            if meta["sender"] == self._rank:
                send = self._sends.pop(meta["id"], None)
                if send is not None:
                    self._queue_send(send)
            else:
                receive = self._matched.pop((rank, meta["id"]), None)
                if receive is not None:
                    self._queue_receive(receive)
        return None

    def _queue_send(self, send: _Send) -> None:
        self._queue(send.task, send.identity, (self._rank, send.receiver), send.payload)

    def _on_taken(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        with self._lock:
            send = self._sends.pop(meta["id"], None)
        if send is not None:
            send.task.settle()
        return None

    def _on_refused(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        with self._lock:
            send = self._sends.pop(meta["id"], None)
        if send is not None:
            text = f"{send.task.call} was refused by rank {rank}: {meta['text']}"
            send.task.settle(MismatchError(text))
        return None

    def _on_withdrawn(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        with self._lock:
            self._offers = [o for o in self._offers if (o.source, o.identity) != (rank, meta["id"])]
            receive = self._matched.pop((rank, meta["id"]), None)
        if receive is not None:
            text = f"{receive.task.call} failed: rank {rank} has withdrawn its message"
            receive.task.settle(CollectiveError(text))
        return None

    def _on_lost(self, rank: int) -> None:
        with self._lock:
            waiting = [send.task for send in self._sends.values() if send.receiver == rank]
            waiting += [r.task for r in self._posted if r.source == rank]
            waiting += [r.task for (source, _), r in self._matched.items() if source == rank]
        for task in waiting:
            self.give_up(
                task, PeerLostError(f"{task.call} failed: the process of rank {rank} has ended")
            )

    def _tell(self, rank: int, kind: str, meta: dict[str, Any]) -> None:
        if rank == self._rank:
            self._handlers[kind](rank, meta, b"")
            return
        try:
            self._channel.send(rank, kind, meta)
        except PeerLostError:  # on_lost() has told whoever waits for it
            return


def _offer(source: int, meta: Meta, body: bytes | torch.Tensor | None) -> _Offer:
    return _Offer(
        source=source,
        identity=meta["id"],
        group=meta["group"],
        tag=meta["tag"],
        dtype=meta["dtype"],
        count=meta["count"],
        body=body,
    )


def _fits(receive: _Receive, offer: _Offer) -> bool:
    return (
        receive.group == offer.group
        and receive.tag == offer.tag
        and receive.source in (None, offer.source)
        and not receive.task.is_settled
    )
