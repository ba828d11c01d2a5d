"""How long a compiled program's collectives take by the model of links, and how long they must.

time = bytes x (chips - 1) / chips / (links x bandwidth), twice that for an all-reduce. Links are
what the program uses (2 for a phase, a colour each), and no more than there are. Latency (about
1 us a hop), barriers, HBM and the links between the devices of a chip are left out. No figure here
was measured on a chip.

Between slices: bytes x (slices - 1) / slices / (a device's share of its chip's DCN bandwidth),
twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_dist.collectives.compiled_program import CompiledCollective
from tpu_dist.topology.errors import UnsupportedError
from tpu_dist.topology.groups import CORE_AXIS, Group
from tpu_dist.topology.placement import group_of
from tpu_dist.topology.rank_map import Numbers, coordinates
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.system import System

# By kind in HLO: how often the whole payload crosses a chip's links, and what of the result the
# payload is (None: the result itself; a reduce-scatter's is the result of one times the members).
_PASSES: Mapping[str, float] = {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-reduce": 2,
    "all-to-all": 0.25,  # of a ring's way, on average a quarter: the scaling book's figure
    "collective-broadcast": 1,
    "collective-permute": 1,
}
# What the verbs that XLA has not are done by at best.
_KINDS: Mapping[str, str] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "collective-broadcast",
    "scatter": "collective-broadcast",
}
_MOST_GROUPS = 64  # of a program are looked at: they are alike, or the first ones differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the model says of a program.

    Attributes:
        seconds: of all of its collectives, one after the other.
        links: of the collective within slices that takes longest; less than 1 where they are
            shared, 0 where there is none.
        algorithm: of each collective, with its kind.
    """

    seconds: float
    links: float
    algorithm: str


def estimate(
    system: System, devices: Numbers, collectives: Sequence[CompiledCollective]
) -> Estimate:
    """Return what the model says of a program.

    Args:
        system: what it was compiled for.
        devices: the number of the device at each place of the program's list.
        collectives: as read from it.
    """
    table = coordinates(system)
    # Groups are numbered within a slice: by the places of one slice's devices.
    devices = devices[table[devices, 0] == table[devices[0], 0]]
    seconds, longest, links, names = 0.0, -1.0, 0.0, []
    for collective in collectives:
        if collective.num_slices > 1:
            seconds += _dcn_seconds(system, collective)
            names.append(f"{collective.kind} (over DCN, {collective.num_slices} slices)")
            continue
        groups = collective.groups[:_MOST_GROUPS] or (tuple(range(devices.size)),)
        bounds = [_seconds(system.slice, table[devices[list(g)]], collective) for g in groups]
        worst, used = max(bounds)
        seconds += worst
        if worst > longest:
            longest, links = worst, used
        name = f"{collective.kind} ({collective.algorithm}, {collective.colours} colours)"
        names.append(name)
    return Estimate(seconds=seconds, links=links, algorithm=" + ".join(dict.fromkeys(names)))


def ideal_seconds(group: Group, verb: str, num_bytes: int, *, num_slices: int = 1) -> float:
    """Return what a collective over a group takes if every link that it has is used.

    Over several slices: if each device exchanges its piece alone with those at its place there.

    Args:
        group: in one slice.
        verb: as in ``all_reduce``.
        num_bytes: of the payload.
        num_slices: that the collective joins, each with such a group.
    """
    passes = _PASSES[_KINDS[verb]]
    share = 1 - 1 / group.num_chips
    seconds = passes * num_bytes * share / (group.available_links * _bandwidth(group.slice))
    if num_slices > 1:
        piece = num_bytes / (group.num_chips * group.num_cores)
        seconds += passes * piece * (1 - 1 / num_slices) / _dcn_of_device(group.slice)
    return seconds


def _dcn_seconds(system: System, collective: CompiledCollective) -> float:
    payload = collective.result_bytes
    if collective.kind == "reduce-scatter":
        payload *= collective.num_slices
    passes = _PASSES[collective.kind]
    share = 1 - 1 / collective.num_slices
    return passes * payload * share / _dcn_of_device(system.slice)


def _dcn_of_device(slice_: Slice) -> float:
    generation = slice_.generation
    if generation.dcn_bandwidth is None:
        raise UnsupportedError(f"{generation} slices are not joined over DCN.")
    return generation.dcn_bandwidth / generation.devices_per_chip


def _seconds(slice_: Slice, places: Numbers, collective: CompiledCollective) -> tuple[float, float]:
    """Return the time of one group, and the links that it uses."""
    chips = len({tuple(place[:4]) for place in places.tolist()})
    if chips == 1:
        return 0.0, 0.0
    payload = collective.result_bytes
    if collective.kind == "reduce-scatter":
        payload *= len(places)
    links = _links_used(slice_, places, collective)
    if collective.kind == "collective-permute":
        return payload / (links * _bandwidth(slice_)), links
    passes = _PASSES[collective.kind]
    return passes * payload * (1 - 1 / chips) / (links * _bandwidth(slice_)), links


def _links_used(slice_: Slice, places: Numbers, collective: CompiledCollective) -> float:
    group = group_of(slice_, places)
    asked = min(collective.colours, 2 * collective.phases)
    if group is None:  # no block: a ring at most, which others cross
        return min(asked, 1)
    on_chips = [digit for digit in group.digits if digit.axis != CORE_AXIS]
    share = slice_.generation.devices_per_chip / group.num_cores
    if collective.phases >= len(on_chips):
        return min(asked / share, group.available_links)
    if group.spans_whole_axes:  # one ring through all of it
        return min(asked, 2) / share
    return min(asked / share, group.num_links)


def _bandwidth(slice_: Slice) -> float:
    return slice_.generation.link_bandwidth
