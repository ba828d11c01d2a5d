"""One run, as the service sees it: who is there, the round they are in, and what comes next.

A run goes round by round. Hosts wait; when all are there they are ranked; workers run. Whatever
ends the round (a worker or a host that failed, a host that wants in) is told to all at once; each
stops its workers and says what had failed on its side. When all have, the first failure is known,
and the verdict is given: another round, or the end of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import grpc

from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.launch.service.checks import Refused
from tpu_dist.launch.service.metrics import Counters
from tpu_dist.launch.service.ranking import first_workers, host_order
from tpu_dist.launch.service.roster import Member, Roster
from tpu_dist.launch.service.round import Round
from tpu_dist.launch.service.timers import Timers

_logger = logging.getLogger(__name__)

NOTICE_SECONDS = 5.0  # between two words to hosts that wait
STORE_SECONDS = 60.0  # that rank 0 gets to open its store
RECOVERY_SECONDS = 20.0  # that hosts get to find a server that was started anew
STOP_MARGIN_SECONDS = 20.0  # beyond the grace of workers: SIGKILL, logs, the way back


class Job:
    """One run. Not thread-safe: lives in the server's event loop, and never blocks."""

    def __init__(self, run_id: str, first: pb.Host, counters: Counters) -> None:
        self.run_id = run_id
        self.waiting: dict[str, Member] = {}
        self.closed: pb.Closed | None = None
        self._roster = Roster(first)
        self._terms = first.terms
        self._counters = counters
        self._round: Round | None = None
        self._last_round = 0
        self._restarts = 0
        self._timers = Timers()
        self._waiting_since: float | None = None

    def join(self, member: Member, standing: pb.Standing) -> None:
        """Let a host in, or back in; follow with `update`.

        Raises:
            Refused: it does not fit, is here already, or the run has ended or is full.
        """
        if self.closed is not None and not standing.round:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE,
                f"run {self.run_id!r} has ended ({self.closed.reason}); a new one by that name can "
                f"begin when its last host has left",
            )
        self._roster.add(member)
        self.waiting.pop(member.name, None)
        if self.closed is not None:
            self._tell([member], pb.ToHost(closed=self.closed))
        elif standing.round:
            self._tell([member], pb.ToHost())  # so that it knows that it is back

    def update(self, member: Member, standing: pb.Standing) -> None:
        """Take up what a host says of itself."""
        if not self._roster.has(member) or self.closed is not None:
            return
        member.standing = standing
        self._restarts = max(self._restarts, standing.restarts)
        if standing.round > self._last_round:
            self._last_round = standing.round
            if standing.state not in (pb.WAITING, pb.LEAVING):
                self._restore(standing)
        if standing.state != pb.WAITING:
            self.waiting.pop(member.name, None)
            self._fill(member)
        _UPDATES[standing.state](self, member)

    def lost(self, member: Member, why: str) -> None:
        """Take note that a host's connection has ended."""
        if self._roster.has(member):
            self._counters.hosts_lost += 1
            self._leave(member, why, lost=True)

    @property
    def num_hosts(self) -> int:
        """How many hosts are here."""
        return len(self._roster.members)

    def end(self) -> None:
        """Stop its clocks; nothing may follow."""
        self._timers.stop_all()

    # What hosts say.

    def _on_waiting(self, member: Member) -> None:
        current, rank = self._round, self._rank(member)
        if current is not None and rank is not None and not current.over:
            if member.standing.round < current.number and current.is_well and not current.restored:
                if rank == 0 or current.store is not None:  # it came anew before it heard
                    self._assign(current, [rank])
                return
            self._stopped(current, rank, f"host {member.name} started its workers anew")
        self.waiting[member.name] = member
        self._gather()

    def _on_running(self, member: Member) -> None:
        current = self._current(member)
        if current is None or not current.is_well:
            self._tell([member], _broken(member.standing.round, self._cause_for(member)))
        elif member.standing.HasField("store") and current.store is None and not self._rank(member):
            self._timers.stop("store")
            current.store = member.standing.store
            self._assign(current, range(1, len(current.names)))

    def _on_failing(self, member: Member) -> None:
        self._on_failure(member)
        self._on_running(member)

    def _on_stopped(self, member: Member) -> None:
        current = self._current(member)
        if current is None or current.over:
            self._tell(
                [member], self._verdict(member.standing.round, None, self._cause_for(member))
            )
            return
        self._on_failure(member)
        self._stopped(current, member.standing.rank, f"host {member.name} stopped its workers")

    def _on_failure(self, member: Member) -> None:
        current, standing = self._current(member), member.standing
        if current is None or current.over or not standing.HasField("failure"):
            return
        standing.failure.host = member.name
        standing.failure.is_host = False
        current.note(standing.failure, self._timers.now())
        self._break(current, f"rank {standing.failure.rank} on host {member.name} failed")

    def _on_done(self, member: Member) -> None:
        current = self._current(member)
        if current is None or not current.is_well:
            self._on_running(member)
            return
        current.done.add(member.standing.rank)
        if len(current.done) == len(current.names):
            self._close(pb.Closed(succeeded=True, reason="all workers ended well"))

    def _on_leaving(self, member: Member) -> None:
        reason = member.standing.reason or "it left"
        if member.standing.ends_run:
            self._forget(member)
            self._close(pb.Closed(reason=f"host {member.name} ended the run: {reason}"))
        else:
            self._leave(member, reason)

    # Rounds.

    def _gather(self) -> None:
        """Begin a round if all are there, or as many as must be and the others had their time."""
        if self.closed is not None or not self.waiting:
            return
        if "notice" not in self._timers:
            self._timers.start("notice", NOTICE_SECONDS, self._say_who_is_missing)
        current = self._round
        if current is not None and not current.over:
            room = len(current.names) < self._terms.max_hosts
            if current.is_well and current.store is not None and room:
                names = ", ".join(list(self.waiting)[:3])
                self._break(current, f"{len(self.waiting)} more hosts want in: {names}")
            return
        if self._waiting_since is None:
            self._waiting_since = self._timers.now()
            self._timers.start("join", self._terms.join_seconds, self._give_up)
        if len(self.waiting) >= self._terms.max_hosts:
            self._rank_hosts()
        elif len(self.waiting) >= self._terms.min_hosts and "last call" not in self._timers:
            self._timers.start("last call", self._terms.last_call_seconds, self._last_call)

    def _last_call(self) -> None:
        if len(self.waiting) >= self._terms.min_hosts:
            self._rank_hosts()

    def _rank_hosts(self) -> None:
        self._timers.stop("join", "last call")
        before = self._round
        candidates = list(self.waiting.values())
        if before is not None:  # spares come after those who were in the last round
            candidates.sort(key=lambda member: before.rank_of(member.name) is None)
        chosen = candidates[: self._terms.max_hosts]
        chosen.sort(key=lambda member: host_order(member.host))
        self._last_round += 1
        self._round = Round(number=self._last_round, names=[member.name for member in chosen])
        for member in chosen:
            del self.waiting[member.name]
        if self._waiting_since is not None:
            self._counters.last_gathering_seconds = self._timers.now() - self._waiting_since
            self._waiting_since = None
        self._counters.rounds += 1
        self._assign(self._round, [0])
        self._timers.start("store", STORE_SECONDS, chosen[0].cut)

    def _assign(self, current: Round, ranks: Iterable[int]) -> None:
        members = [self._roster.members[name] for name in current.names]
        firsts, total = first_workers(member.host for member in members)
        shared: dict[int, pb.Assigned] = {}  # what is the same for all hosts of a slice
        for member in members:
            place = member.host.place
            common = shared.setdefault(place.slice, pb.Assigned())
            if member.host.HasField("place"):
                common.addresses.append(member.host.address)
        for common in shared.values():
            common.round, common.num_hosts, common.num_workers = current.number, len(members), total
            common.restarts, common.coordinator = self._restarts, members[0].host.address
            if current.store is not None:
                common.store.CopyFrom(current.store)
        parts = {index: _assignment(common) for index, common in shared.items()}
        for rank in ranks:
            member = members[rank]
            own = pb.Assigned(rank=rank, first_worker=firsts[rank])
            if rank == 0:
                own.members.extend(current.names)
            current.open.add(rank)
            # protobuf merges a message that comes in parts: the long lists are serialised once.
            member.outbox.put_nowait((parts[member.host.place.slice], _assignment(own)))

    def _break(self, current: Round, cause: str) -> None:
        if not current.is_well:
            return
        current.cause = cause
        self._timers.stop("store")
        self._timers.stop("recovery")
        _logger.info("run %s: round %d is broken: %s", self.run_id, current.number, cause)
        self._tell(self._those(current, current.open), _broken(current.number, cause))
        limit = self._terms.stop_seconds + STOP_MARGIN_SECONDS
        self._timers.start("stop", limit, lambda: self._cut_those_who_do_not_stop(current))
        self._maybe_judge(current)

    def _stopped(self, current: Round, rank: int, cause: str) -> None:
        self._break(current, cause)
        current.open.discard(rank)
        self._maybe_judge(current)

    def _maybe_judge(self, current: Round) -> None:
        if current.is_well or current.open or current.over:
            return
        current.over = True
        self._timers.stop("stop")
        root = current.root()
        if root is not None:
            if self._restarts >= self._terms.max_restarts:
                reason = current.cause
                self._close(pb.Closed(reason=reason, failure=root, restarts=self._restarts))
                return
            self._restarts += 1
            self._counters.restarts += 1
        everybody = self._those(current, range(len(current.names)))
        heard = {member for member in everybody if member.standing.state != pb.WAITING}
        self._tell(heard, self._verdict(current.number, root, current.cause or ""))
        # Those who had been ranked, and never heard of it, wait on.
        self.waiting.update({each.name: each for each in everybody if each not in heard})
        self._gather()

    def _cut_those_who_do_not_stop(self, current: Round) -> None:
        for member in self._those(current, list(current.open)):
            member.cut()
            self._leave(member, "it did not stop its workers in time")

    def _leave(self, member: Member, why: str, *, lost: bool = False) -> None:
        """Go on without a host; one that leaves a round that is broken has no part in why it is."""
        self._forget(member)
        self._roster.note_gone(member.name, self._timers.now(), why)
        current, rank = self._round, self._rank(member)
        if current is None or rank is None or current.over or self.closed is not None:
            return
        if current.store is not None and (lost or current.is_well):
            failure = pb.Failure(host=member.name, is_host=True, message=why)
            current.note(failure, self._timers.now())
        self._stopped(current, rank, f"host {member.name} is lost: {why}")

    def _forget(self, member: Member) -> None:
        self._roster.remove(member)
        self.waiting.pop(member.name, None)

    # A server that was started anew.

    def _restore(self, standing: pb.Standing) -> None:
        """Take up a round that a server before this one had ranked."""
        self._round = Round(
            number=standing.round,
            names=[""] * standing.num_hosts,
            store=standing.store if standing.HasField("store") else pb.Store(),
            restored=True,
        )
        self._timers.start("recovery", RECOVERY_SECONDS, self._end_recovery)

    def _fill(self, member: Member) -> None:
        current, standing = self._round, member.standing
        if current is None or current.number != standing.round:
            return
        if not current.restored or current.over:
            return
        rank = standing.rank
        if rank < len(current.names) and current.names[rank] in ("", member.name):
            current.put(member.name, rank)
            current.open.add(rank)
        for rank, name in enumerate(standing.members[: len(current.names)]):
            if not current.names[rank]:
                current.put(name, rank)
        if len(current.open) == len(current.names):
            self._timers.stop("recovery")

    def _end_recovery(self) -> None:
        current = self._round
        if current is None or current.over:
            return
        for rank, name in enumerate(current.names):
            if name not in self._roster.members:
                shown = name or f"of rank {rank}"
                why = "it did not come back to the server, which was started anew"
                current.note(pb.Failure(host=shown, is_host=True, message=why), self._timers.now())
                self._break(current, f"host {shown} is lost: {why}")

    # Words.

    def _say_who_is_missing(self) -> None:
        if not self.waiting:
            return
        notice = pb.Waiting(here=len(self.waiting), wanted=self._terms.min_hosts)
        if self._waiting_since is None:  # a round goes on: these are spares
            notice.here = notice.wanted
        else:
            notice.missing = self._missing()
        self._tell(self.waiting.values(), pb.ToHost(waiting=notice))
        self._timers.start("notice", NOTICE_SECONDS, self._say_who_is_missing)

    def _give_up(self) -> None:
        self._close(
            pb.Closed(
                reason=f"only {len(self.waiting)} of {self._terms.min_hosts} hosts came within "
                f"{self._terms.join_seconds:g} s. Missing: {self._missing()}"
            )
        )

    def _missing(self) -> str:
        here = [member.host for member in self.waiting.values()]
        return self._roster.describe_missing(here, self._timers.now())

    def _close(self, closed: pb.Closed) -> None:
        if self.closed is None:
            _logger.info("run %s has ended: %s", self.run_id, closed.reason)
            self.closed = closed
            self.end()
            self._tell(self._roster.members.values(), pb.ToHost(closed=closed))

    def _verdict(self, number: int, failure: pb.Failure | None, cause: str) -> pb.ToHost:
        verdict = pb.Verdict(
            round=number,
            restarts=self._restarts,
            cause=cause,
            failure=failure,
            max_restarts=self._terms.max_restarts,
        )
        return pb.ToHost(verdict=verdict)

    def _cause_for(self, member: Member) -> str:
        current = self._current(member)
        if current is not None and current.cause is not None:
            return current.cause
        return f"host {member.name} had been given up: its connection was lost for too long"

    # Small things.

    def _current(self, member: Member) -> Round | None:
        """Return the round that the member speaks of, if it is the run's and has it so."""
        current, standing = self._round, member.standing
        if current is None or current.number != standing.round:
            return None
        return current if current.rank_of(member.name) == standing.rank else None

    def _rank(self, member: Member) -> int | None:
        return self._round.rank_of(member.name) if self._round is not None else None

    def _those(self, current: Round, ranks: Iterable[int]) -> list[Member]:
        return self._roster.those(current.names[rank] for rank in ranks)

    def _tell(self, members: Iterable[Member], message: pb.ToHost) -> None:
        data = message.SerializeToString()
        for member in members:
            member.outbox.put_nowait((data,))


_UPDATES: Mapping[int, Callable[[Job, Member], None]] = {
    pb.WAITING: Job._on_waiting,
    pb.RUNNING: Job._on_running,
    pb.FAILING: Job._on_failing,
    pb.STOPPED: Job._on_stopped,
    pb.DONE: Job._on_done,
    pb.LEAVING: Job._on_leaving,
}


def _assignment(assigned: pb.Assigned) -> bytes:
    data: bytes = pb.ToHost(assigned=assigned).SerializeToString()
    return data


def _broken(number: int, cause: str) -> pb.ToHost:
    return pb.ToHost(broken=pb.Broken(round=number, cause=cause))
