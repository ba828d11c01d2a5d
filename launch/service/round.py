"""One round of a run: its hosts by rank, which of them have stopped, and what failed first."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_dist.launch.service import rendezvous_pb2 as pb

EXPLAINS_SECONDS = 5.0  # that a host's loss may be known after failures which it caused


@dataclass(slots=True, kw_only=True)
class Round:
    """A round, from its ranking until all of its hosts have stopped.

    Attributes:
        number: counted from 1 through the run.
        names: hosts by rank; "" of one that has not come back since the server was started anew.
        store: that rank 0 has opened; None until then, and so long only rank 0 knows of the round.
        restored: whether it was taken up from its hosts by a server that was started anew.
        cause: why it is broken; None while it is well.
        open: ranks that were told of it, and have neither stopped nor been lost.
        done: ranks whose workers have all ended well.
        over: whether the verdict has been given.
    """

    number: int
    names: list[str]
    store: pb.Store | None = None
    restored: bool = False
    cause: str | None = None
    open: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    over: bool = False
    _failures: list[tuple[float, pb.Failure]] = field(default_factory=list)
    _ranks: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = {name: rank for rank, name in enumerate(self.names) if name}

    @property
    def is_well(self) -> bool:
        """Whether it goes on."""
        return self.cause is None and not self.over

    def rank_of(self, name: str) -> int | None:
        """Return a host's rank; None if it is not in this round."""
        return self._ranks.get(name)

    def put(self, name: str, rank: int) -> None:
        """Name the host of a rank of which nothing was known."""
        self.names[rank] = name
        self._ranks[name] = rank

    def note(self, failure: pb.Failure, now: float) -> None:
        """Note a failure, dated by its age: hosts' clocks may differ, and never count."""
        known = [
            pair
            for pair in self._failures
            if (pair[1].host, pair[1].is_host) != (failure.host, failure.is_host)
        ]
        self._failures = [*known, (now - failure.age_seconds, failure)]

    def root(self) -> pb.Failure | None:
        """Return what failed first.

        A host that is lost takes its workers along, which its peers' workers notice by failing:
        as that may be known a moment before, its loss counts as the earlier.
        """
        if not self._failures:
            return None
        at, first = min(self._failures, key=lambda pair: pair[0])
        for lost_at, failure in self._failures:
            if failure.is_host and failure.host != first.host and lost_at - at < EXPLAINS_SECONDS:
                return failure
        return first
