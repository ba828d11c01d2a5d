"""What one source says of the slice and of this host in it: claims, each with its origin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from tpu_dist.topology.coordinates import Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import Generation
from tpu_dist.topology.slice import Wraps

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Claim(Generic[T]):
    """A value, and where it was found, as a message names it: ``TPU_TOPOLOGY=4x4x8``."""

    value: T
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What is known so far; None where nobody has said.

    Attributes:
        generation: of the chips.
        num_chips: of one slice.
        shape: of one slice.
        wrap: which of its axes are rings.
        twisted: whether it is a twisted torus.
        chips_per_host: chips that a host holds, or that this container was given.
        host_bounds: how the hosts of a slice stand.
        num_processes: processes that libtpu is told of, in one slice.
        task: this process's index among those, or the host's, where it has one process.
        host: this host's index in its slice.
        completion_index: this pod's index in its job: the host's, in a job of several.
        hostnames: of the slice's hosts, in the order of their indices.
        num_slices: of the job.
        slice_index: of this host's slice.
        coordinator: host, or host:port, that joins the slices.
    """

    generation: Claim[Generation] | None = None
    num_chips: Claim[int] | None = None
    shape: Claim[Shape] | None = None
    wrap: Claim[Wraps] | None = None
    twisted: Claim[bool] | None = None
    chips_per_host: Claim[int] | None = None
    host_bounds: Claim[Shape] | None = None
    num_processes: Claim[int] | None = None
    task: Claim[int] | None = None
    host: Claim[int] | None = None
    completion_index: Claim[int] | None = None
    hostnames: Claim[tuple[str, ...]] | None = None
    num_slices: Claim[int] | None = None
    slice_index: Claim[int] | None = None
    coordinator: Claim[str] | None = None

    def claims(self) -> dict[str, Claim[Any]]:
        """Return what is said, by field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: claim for name, claim in found.items() if claim is not None}


def combine(descriptions: Iterable[Description]) -> Description:
    """Return what several sources say together.

    Raises:
        TopologyError: two of them contradict each other; names both.
    """
    known: dict[str, Claim[Any]] = {}
    for description in descriptions:
        for name, claim in description.claims().items():
            before = known.setdefault(name, claim)
            if not _same(name, before.value, claim.value):
                raise contradiction(_WORDS[name], before, claim)
    return Description(**known)


def agree(what: str, claims: Iterable[Claim[T] | None]) -> Claim[T] | None:
    """Return the first claim; all that are made must say the same.

    Raises:
        TopologyError: two contradict each other; names both.
    """
    made = [claim for claim in claims if claim is not None]
    for claim in made[1:]:
        if claim.value != made[0].value:
            raise contradiction(what, made[0], claim)
    return made[0] if made else None


def contradiction(what: str, one: Claim[Any], other: Claim[Any]) -> TopologyError:
    """Return the error for two claims that cannot both hold."""
    return TopologyError(
        f"{what} is {value_text(one.value)} by {one.origin}, and {value_text(other.value)} by "
        f"{other.origin}. One of them is left over from another slice or job: unset or correct it."
    )


def _same(name: str, one: Any, other: Any) -> bool:
    if name != "hostnames" or len(one) != len(other):
        return bool(one == other)
    return all(map(_same_host, one, other))


def _same_host(one: str, other: str) -> bool:
    """Whether two names may be one host's: a name and an address cannot be told apart here."""
    if _is_address(one) or _is_address(other):
        return one == other or _is_address(one) != _is_address(other)
    return one.partition(".")[0].lower() == other.partition(".")[0].lower()


def _is_address(host: str) -> bool:
    return host.startswith("[") or all(part.isdigit() for part in host.split("."))


def value_text(value: object) -> str:
    """Return a claim's value as a message shows it."""
    if isinstance(value, Shape):
        return "x".join(map(str, value))
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    return str(value)


_WORDS = {
    "generation": "the generation",
    "num_chips": "the number of chips of a slice",
    "shape": "the shape of a slice",
    "wrap": "the wrap-around of the axes",
    "twisted": "whether the torus is twisted",
    "chips_per_host": "the number of chips of a host",
    "host_bounds": "the grid of hosts",
    "num_processes": "the number of processes",
    "task": "the index of this process",
    "host": "the index of this host",
    "completion_index": "the index of this pod",
    "hostnames": "the list of hosts",
    "num_slices": "the number of slices",
    "slice_index": "the index of this slice",
    "coordinator": "the slices' coordinator",
}
