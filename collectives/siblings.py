"""The groups of a mesh axis that are called together, and so run as one program of all devices.

Such a program keeps the rings of the slice, which one of a single group's devices does not where
the group is a plane; and on slices with limited routing there are no others. Nothing in c10d says
that groups are called together, and a program of all devices in which some rank does not take part
waits for it. So it is done for groups that the user has promised it of, and checked at every call:
envelopes are exchanged among the ranks of all the groups, on the lane that they all share. Calls
that differ are a mismatch on every rank; a rank that does not come is named when the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpu_dist.collectives.envelope import Envelope, Signature, check_agreement
from tpu_dist.collectives.programs import Programs
from tpu_dist.topology.errors import UnsupportedError
from tpu_dist.topology.groups import Group
from tpu_dist.topology.placement import Placement, place_group
from tpu_dist.topology.rank_map import RankMap

if TYPE_CHECKING:
    from tpu_dist.runtime.runtime import Runtime


class Siblings:
    """Groups of one size that share out all ranks; what operations need to know of this rank's.

    Attributes:
        groups: global ranks of each.
        uid: tells their calls from those of other groups.
        programs: of all of them together.
    """

    def __init__(self, runtime: Runtime, groups: Sequence[Sequence[int]], uid: str) -> None:
        """Look whether one program can serve them all.

        Raises:
            UnsupportedError: their members do not stand alike, or nobody knows how they stand.
        """
        self.groups = tuple(map(tuple, groups))
        self.uid = uid
        self._own = next(group for group in self.groups if runtime.rank in group)
        self._device = runtime.device
        placement = _common_placement(runtime.rank_map, self.groups)
        devices = [[runtime.devices[rank] for rank in group] for group in self.groups]
        self.programs = Programs(devices, runtime.device, placement)
        self.index = self._own.index(runtime.rank)

    @property
    def everyone(self) -> tuple[int, ...]:
        """The ranks of all groups, ascending."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    # --- what operations ask (operations.Members)

    @property
    def table(self) -> str:
        """The platform whose table of plans is used."""
        return "tpu"

    @property
    def device(self) -> Any:
        """This process's device."""
        return self._device

    @property
    def num_ranks(self) -> int:
        """Number of ranks in each group."""
        return len(self._own)

    # --- what their lane asks

    def own(self, envelopes: Sequence[Envelope], ranks: Sequence[int]) -> list[Envelope]:
        """Return those of this rank's group.

        Args:
            envelopes: of all groups.
            ranks: whose each is.
        """
        return _of(self._own, envelopes, ranks)

    def check_agreement(
        self, signature: Signature, envelopes: Sequence[Envelope], ranks: Sequence[int]
    ) -> None:
        """See that all groups called the same, and each group's ranks sizes that fit.

        Raises:
            MismatchError: on every rank of all groups.
        """
        first, *others = self.groups
        for group in (first, *others):
            check_agreement(signature, _of(group, envelopes, ranks), group)
        # Each group agrees; do they with each other?
        heads = [_without_sizes(_of(group, envelopes, ranks)[0]) for group in self.groups]
        check_agreement(signature, heads, [group[0] for group in self.groups])


def _of(
    group: Sequence[int], envelopes: Sequence[Envelope], ranks: Sequence[int]
) -> list[Envelope]:
    by_rank = dict(zip(ranks, envelopes, strict=True))
    return [by_rank[rank] for rank in group]


def _without_sizes(envelope: Envelope) -> Envelope:
    return Envelope(
        call=envelope.call,
        sequence=envelope.sequence,
        sends=(),
        receives=(),
        is_inline=envelope.is_inline,
        others=envelope.others,
        payload=envelope.payload,
    )


def _shape(group: Group | None) -> list[tuple[int, int]]:
    return [] if group is None else [(digit.axis, digit.size) for digit in group.digits]


def _common_placement(rank_map: RankMap | None, groups: Sequence[Sequence[int]]) -> Placement:
    if rank_map is None:
        raise UnsupportedError(
            "groups can run as one program where it is known how their ranks stand in a slice: on "
            "a TPU, or on the CPU stand-in with TPU_DIST_TOPOLOGY. Leave lockstep out."
        )
    first, *others = (place_group(rank_map, group) for group in groups)
    for other in others:
        alike = (other.extent, other.num_slices, other.order) == (
            first.extent,
            first.num_slices,
            first.order,
        )
        if not alike or first.group is None or _shape(other.group) != _shape(first.group):
            raise UnsupportedError(
                f"the groups {groups[0]} and {groups[-1]} do not stand alike in "
                f"{rank_map.system}, so no program serves both. Leave lockstep out, or let "
                f"tpu_dist.init_device_mesh lay out the mesh."
            )
    return first
