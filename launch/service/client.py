"""A host's membership for code that blocks: the launcher's main thread asks, a thread talks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from tpu_dist.launch.errors import RendezvousError
from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.membership import Membership
from tpu_dist.launch.service.security import Security

_LEAVE_SECONDS = 3.0
_STEP_SECONDS = 0.5  # how long a signal may wait for the main thread


class RendezvousClient:
    """Owns the thread with the event loop of one `Membership`; use `close` in the end.

    Thread-safe. All that blocks has a deadline, and ends at once when the run does.

    Args:
        endpoint: host:port of the service.
        host: who this is.
        security: what to prove it by.
        say: called with what a user should know, from the thread.
        on_outage: called when the service does not answer, once for each outage, from a thread.
    """

    def __init__(
        self,
        endpoint: str,
        host: pb.Host,
        security: Security,
        say: Callable[[str], None],
        on_outage: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._on_outage = on_outage
        self._endpoint = endpoint
        self._say = say
        self._changed = threading.Condition()  # guards what follows
        self._assigned: pb.Assigned | None = None
        self._broken: pb.Broken | None = None
        self._verdict: pb.Verdict | None = None
        self._closed: pb.Closed | None = None
        self._error: RendezvousError | None = None
        self._missing = ""
        self._heard_at = time.monotonic()
        self._standing = pb.Standing()
        self._loop = asyncio.new_event_loop()
        self._membership = Membership(
            endpoint=endpoint,
            host=host,
            security=security,
            on_message=self._hear,
            on_link=self._on_link,
            first_patience=host.terms.join_seconds,
        )
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="tpu-launch-rendezvous", daemon=True)

    def next_round(self) -> pb.Assigned:
        """Wait for a round, and return this host's part in it.

        Raises:
            RendezvousError: the run has ended, the service refuses this host or is not to be
                reached, or too few hosts came; says who is missing.
        """
        with self._changed:
            self._assigned = self._broken = self._verdict = None
            last = self._standing
            self._standing = pb.Standing(round=last.round, restarts=last.restarts)
            self._tell()
            if not self._thread.is_alive():
                self._thread.start()
            limit = self._host.terms.join_seconds + 60  # the service's own deadline comes first
            self._wait(lambda: self._assigned is not None, limit, "a round")
            assigned = self._assigned
            assert assigned is not None
            self._standing = pb.Standing(
                state=pb.RUNNING,
                round=assigned.round,
                rank=assigned.rank,
                num_hosts=assigned.num_hosts,
                restarts=assigned.restarts,
                members=assigned.members,
            )
            self._membership.standing = self._standing
            return assigned

    def publish(self, store: pb.Store) -> None:
        """Tell the others where the store is: rank 0 must."""
        with self._changed:
            self._standing.store.CopyFrom(store)
            self._tell()

    def end_of_round(self) -> pb.Broken | pb.Closed | RendezvousError | None:
        """Return what has ended the round, or the run; None while it is well. Does not block."""
        with self._changed:
            return self._error or self._closed or self._broken

    def failing(self, failure: pb.Failure) -> None:
        """Tell that a worker has failed, before the others are stopped."""
        with self._changed:
            self._standing.state = pb.FAILING
            self._standing.failure.CopyFrom(failure)
            self._tell()

    def done(self) -> None:
        """Tell that all workers of this host have ended well."""
        with self._changed:
            self._standing.state = pb.DONE
            self._tell()

    def settle(self, failure: pb.Failure | None) -> pb.Verdict | pb.Closed:
        """Tell that no worker is left, and wait for what comes next.

        Raises:
            RendezvousError: the service is not to be reached, or says nothing in time.
        """
        with self._changed:
            if self._closed is not None:
                return self._closed
            self._standing.state = pb.STOPPED
            if failure is not None:
                self._standing.failure.CopyFrom(failure)
            self._tell()
            limit = self._host.terms.stop_seconds + 60
            self._wait(lambda: (self._verdict or self._closed) is not None, limit, "the verdict")
            if self._verdict is not None:
                self._standing.restarts = self._verdict.restarts
                return self._verdict
            assert self._closed is not None
            return self._closed

    def leave(self, reason: str, *, ends_run: bool = False) -> None:
        """Say goodbye and wait a moment until that has been heard; not if the run has ended."""
        with self._changed:
            if not self._thread.is_alive() or self._closed is not None or self._error is not None:
                return
            self._standing.state = pb.LEAVING
            self._standing.reason, self._standing.ends_run = reason, ends_run
            self._tell()
        self._thread.join(_LEAVE_SECONDS)

    def close(self) -> None:
        """End the thread and the connection."""
        if self._thread.is_alive():
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(_LEAVE_SECONDS)

    def _wait(self, is_ready: Callable[[], bool], limit: float, what: str) -> None:
        """Wait as long as the service says something every now and then."""
        self._heard_at = time.monotonic()
        while not is_ready():
            if self._error is not None:
                raise self._error
            if self._closed is not None:
                raise RendezvousError(_end_text(self._closed))
            if time.monotonic() > self._heard_at + limit:
                raise RendezvousError(
                    f"the rendezvous at {self._endpoint} has not given {what} within {limit:g} s. "
                    f"Missing: {self._missing or 'unknown'}"
                )
            self._changed.wait(_STEP_SECONDS)

    def _tell(self) -> None:
        standing = pb.Standing()
        standing.CopyFrom(self._standing)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._membership.tell, standing)
        else:
            self._membership.standing = standing

    def _run(self) -> None:
        async def run() -> None:
            self._task = asyncio.current_task()
            await self._membership.run()

        error: RendezvousError | None = None
        try:
            self._loop.run_until_complete(run())
        except RendezvousError as failed:
            error = failed
        except asyncio.CancelledError:
            pass
        except Exception as failed:  # noqa: BLE001 - the edge of the thread: nobody else would see it
            error = RendezvousError(f"the rendezvous client failed: {failed!r}")
            error.__cause__ = failed
        finally:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._end_loop()

    def _end_loop(self) -> None:
        """Let gRPC's own tasks come to their end."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def _hear(self, message: pb.ToHost) -> None:
        with self._changed:
            self._heard_at = time.monotonic()
            kind = message.WhichOneof("kind")
            number = self._standing.round
            if kind == "assigned" and message.assigned.round > number:
                self._assigned = message.assigned
            elif kind == "broken" and message.broken.round >= number:
                self._broken = message.broken
            elif kind == "verdict" and message.verdict.round == number:
                self._verdict = message.verdict
            elif kind == "closed":
                self._closed = message.closed
            elif kind == "waiting":
                self._say_missing(message.waiting)
            self._changed.notify_all()

    def _say_missing(self, waiting: pb.Waiting) -> None:
        count = waiting.wanted - waiting.here
        before, self._missing = self._missing, waiting.missing or "nobody"
        if _without_numbers(before) == _without_numbers(self._missing):
            return
        if count > 0:
            self._say(f"waiting for {count} of {waiting.wanted} hosts. Missing: {waiting.missing}")
        elif not waiting.missing:
            self._say("the run has all the hosts that it wants: waiting as a spare")

    def _on_link(self, why: str | None) -> None:
        if why is not None:
            self._say(f"the rendezvous at {self._endpoint} does not answer; trying on ({why})")
            self._loop.run_in_executor(None, self._on_outage)
        elif self._membership.num_connections > 1:
            self._say(f"the rendezvous at {self._endpoint} is there again")


def terms(
    *,
    min_hosts: int,
    max_hosts: int,
    max_restarts: int,
    join_timeout: timedelta,
    last_call: timedelta,
    stop_timeout: timedelta,
) -> pb.Terms:
    """Return what a host says that it was told."""
    return pb.Terms(
        min_hosts=min_hosts,
        max_hosts=max_hosts,
        max_restarts=max_restarts,
        join_seconds=join_timeout.total_seconds(),
        last_call_seconds=last_call.total_seconds(),
        stop_seconds=stop_timeout.total_seconds(),
    )


def _end_text(closed: pb.Closed) -> str:
    return "the run has ended: all workers ended well" if closed.succeeded else closed.reason


def _without_numbers(text: str) -> str:
    """Tell notices apart by who is missing, not by for how many seconds."""
    return "".join(each for each in text.partition(" (here")[0] if not each.isdigit())
