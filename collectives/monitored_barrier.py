"""A barrier that finds out who is missing, without spoiling the group: over the channel alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from tpu_dist.runtime.channel import Channel, Meta
from tpu_dist.topology.errors import CollectiveTimeoutError, PeerLostError


class MonitoredBarriers:
    """The monitored barriers of this process. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._arrived: dict[str, set[int]] = {}
        self._verdicts: dict[str, str] = {}
        channel.on("arrived", self._on_arrived)
        channel.on("verdict", self._on_verdict)
        channel.on_lost(self._on_lost)

    def wait(
        self,
        key: str,
        ranks: Sequence[int],
        own_rank: int,
        timeout: timedelta,
        *,
        wait_all_ranks: bool,
    ) -> None:
        """Wait until all of `ranks` (global) have come. Collective, blocks.

        Args:
            key: names this barrier; the same on all ranks.
            ranks: global ranks of the group; the first one collects.
            own_rank: of this process.
            timeout: for all of them to come.
            wait_all_ranks: have the first rank name every missing rank, not the first one found.

        Raises:
            CollectiveTimeoutError: names the ranks that did not come.
            PeerLostError: the collecting rank's process has ended.
        """
        if own_rank == ranks[0]:
            self._collect(key, ranks, timeout, wait_all_ranks=wait_all_ranks)
            return
        leader = ranks[0]
        self._channel.send(leader, "arrived", {"key": key})
        with self._changed:
            # The leader waits as long, and may have come later: its verdict is worth the wait.
            self._changed.wait_for(
                lambda: key in self._verdicts or self._channel.is_lost(leader),
                2 * timeout.total_seconds() + 1,
            )
            verdict = self._verdicts.pop(key, None)
        if verdict is None and self._channel.is_lost(leader):
            raise PeerLostError(f"monitored_barrier: the process of rank {leader} has ended")
        if verdict is None:
            verdict = f"rank {leader} did not come to monitored_barrier"
        if verdict:
            raise CollectiveTimeoutError(verdict)

    def _collect(
        self, key: str, ranks: Sequence[int], timeout: timedelta, *, wait_all_ranks: bool
    ) -> None:
        awaited = set(ranks[1:])
        deadline = time.monotonic() + timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(
                lambda: awaited <= self._arrived.get(key, set()), deadline - time.monotonic()
            )
            missing = sorted(awaited - self._arrived.pop(key, set()))
        verdict = ""
        if missing:
            named = missing if wait_all_ranks else missing[:1]
            listed = ", ".join(map(str, named))
            verdict = (
                f"ranks {listed} failed to pass monitored_barrier in "
                f"{timeout.total_seconds() * 1000:.0f} ms. Look at the logs of those ranks first."
            )
        for rank in ranks[1:]:
            try:
                self._channel.send(rank, "verdict", {"key": key, "text": verdict})
            except PeerLostError:
                continue
        if verdict:
            raise CollectiveTimeoutError(verdict)

    def _on_arrived(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        with self._changed:
            self._arrived.setdefault(meta["key"], set()).add(rank)
            self._changed.notify_all()
        return None

    def _on_lost(self, rank: int) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_verdict(self, rank: int, meta: Meta, body: bytes) -> Meta | None:
        with self._changed:
            self._verdicts[meta["key"]] = meta["text"]
            self._changed.notify_all()
        return None
