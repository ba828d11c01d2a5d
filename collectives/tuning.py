"""Which tuned form a collective takes: one table, by verb, group, dtype, size and generation.

What it rests on are programs that libtpu 0.0.42 compiled; `tpu-launch plan` shows them, and
docs/ici.md has what they use of the links.

- all_gather and all_reduce stay flat: with the SparseCore they use all links of whole axes. On
  v5e, which has none, a flat all_gather of 64 chips and more is no ring; as rows of 128 it is one.
- An all_reduce over members that are spread over their axes is one ring; in rows it is a scatter
  and a gather, and goes along all of the axes.
- A flat reduce_scatter becomes an all-reduce and a slice; in rows it does not, if shards that are
  no multiple of three tiles are padded. Small shards of tpu7x, and v5e where it wraps, want rows of
  1024. Integers and float16 become an all-reduce in any form.
- Above 2,048 devices a whole reduce_scatter becomes an all-reduce: it is done over all axes but
  one of the slice, then over that.
- A reduce_scatter among an odd number of members is not implemented in libtpu 0.0.42: it is an
  all_to_all there, and a sum of what arrives.
- There is no broadcast for TPUs in XLA: it is the sum of the root's payload and of zeros. That
  uses all links at half of what they could carry; a tree of permutes has one link of each chip at
  a time. A scatter is a reduce_scatter of the same kind.

Where more than one layout is listed, `planner.py` compiles them until one is good; the process
group takes the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_dist.collectives.tuned_forms import LANES, TunedForm
from tpu_dist.topology.errors import UnsupportedError
from tpu_dist.topology.groups import CORE_AXIS, Digit, Group
from tpu_dist.topology.placement import Extent, Placement

KIB = 1 << 10

VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter")

_WHOLE = frozenset({Extent.SLICE})
_FLOATS = frozenset({"float32", "bfloat16"})  # what the SparseCore scatters
_MOST_DEVICES_OF_ONE_SCATTER = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the payload of a verb is laid out; the first rule of the table that fits is taken.

    Attributes:
        verb: one of ``VERBS``.
        lanes: elements of a row, in the order of preference; None is flat.
        generations: that it is for; empty: all.
        extents: of the group, likewise.
        dtypes: likewise.
        least_devices: of the group.
        most_shard_bytes: larger pieces of a member take a later rule.
    """

    verb: str
    lanes: tuple[int | None, ...]
    generations: frozenset[str] = frozenset()
    extents: frozenset[Extent] = frozenset()
    dtypes: frozenset[str] = frozenset()
    least_devices: int = 0
    most_shard_bytes: int | None = None

    def fits(self, case: Case) -> bool:
        """Whether this rule may be taken."""
        return (
            self.verb == case.verb
            and (not self.generations or case.generation in self.generations)
            and (not self.extents or case.placement.extent in self.extents)
            and (not self.dtypes or case.dtype in self.dtypes)
            and case.placement.num_members >= self.least_devices
            and (self.most_shard_bytes is None or case.shard_bytes <= self.most_shard_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a form is asked for.

    Attributes:
        verb: one of ``VERBS``.
        placement: of the group.
        dtype: of the payload, as in ``bfloat16``.
        num_bytes: of the payload: the gathered, the reduced, or the one to be scattered.
    """

    verb: str
    placement: Placement
    dtype: str
    num_bytes: int

    @property
    def generation(self) -> str:
        """Name of the generation."""
        return self.placement.system.slice.generation.name

    @property
    def shard_bytes(self) -> int:
        """Bytes of one member's piece."""
        return self.num_bytes // self.placement.num_members


RULES: Sequence[Rule] = (
    Rule(verb="all_reduce", lanes=(None, LANES)),
    Rule(
        verb="all_gather",
        lanes=(LANES, None),
        generations=frozenset({"v5e"}),
        least_devices=64,
    ),
    Rule(verb="all_gather", lanes=(None, LANES)),
    Rule(
        verb="reduce_scatter",
        lanes=(8 * LANES, LANES),
        generations=frozenset({"tpu7x"}),
        extents=_WHOLE,
        dtypes=_FLOATS,
    ),
    Rule(
        verb="reduce_scatter",
        lanes=(8 * LANES, LANES),
        generations=frozenset({"v5e"}),
        extents=_WHOLE,
        dtypes=_FLOATS,
        least_devices=256,
    ),
    Rule(verb="reduce_scatter", lanes=(LANES, 8 * LANES)),
    Rule(verb="all_to_all", lanes=(None,)),
    Rule(verb="broadcast", lanes=(None,)),
    Rule(verb="scatter", lanes=(LANES,)),
)

_SPARSE_CORE = "xla_tpu_enable_sparse_core_"
_OFFLOAD: Mapping[str, bool] = {
    f"{_SPARSE_CORE}collective_offload_{kind}": True
    for kind in (
        "all_gather",
        "2d_all_gather",
        "3d_all_gather",
        "all_reduce",
        "reduce_scatter",
        "nd_reduce_scatter",
    )
}
_ND_SCATTER: Mapping[str, bool] = {f"{_SPARSE_CORE}collective_offload_nd_reduce_scatter": True}
_PADDING: Mapping[str, bool] = {f"{_SPARSE_CORE}reduce_scatter_padding": True}
_BOTH: Mapping[str, bool] = {**_OFFLOAD, **_PADDING}

# The compiler's options by generation and verb; verbs that are missing have none. All of them are
# booleans that libtpu 0.0.42 knows: another type ends the process that compiles, a flag that it
# does not know fails the compile.
OPTIONS: Mapping[str, Mapping[str, Mapping[str, bool]]] = {
    "v2": {},
    "v3": {},
    "v4": {},
    "v5e": {"reduce_scatter": _ND_SCATTER, "scatter": _ND_SCATTER},
    "v5p": {
        "all_reduce": _OFFLOAD,
        "all_gather": _OFFLOAD,
        "broadcast": _OFFLOAD,
        "reduce_scatter": _BOTH,
        "scatter": _BOTH,
    },
    "v6e": {
        "all_reduce": _OFFLOAD,
        "all_gather": _OFFLOAD,
        "broadcast": _OFFLOAD,
        "reduce_scatter": _BOTH,
        "scatter": _BOTH,
    },
    "tpu7x": {
        "all_reduce": _PADDING,
        "broadcast": _PADDING,
        "reduce_scatter": _PADDING,
        "scatter": _PADDING,
    },
}


def tuned_forms(case: Case) -> tuple[TunedForm, ...]:
    """Return the forms worth a compile, the likeliest first; a pure function.

    Raises:
        UnsupportedError: the verb has no form, or nothing is known of the generation.
    """
    if case.verb not in VERBS:
        raise UnsupportedError(f"{case.verb!r} has no tuned form; {', '.join(VERBS)} have.")
    if case.generation not in OPTIONS:
        raise UnsupportedError(
            f"no compiled programs of {case.generation} were read; forms are known for "
            f"{', '.join(OPTIONS)}."
        )
    placement = case.placement
    digits, phases = _digits(placement), None
    scatters = case.verb in ("reduce_scatter", "scatter")
    if scatters and placement.group is not None:
        phases = _scatter_phases(placement.group)
    rule = next(rule for rule in RULES if rule.fits(case))
    return tuple(
        TunedForm(
            verb=case.verb,
            digits=digits,
            num_slices=1 if placement.extent is Extent.SCATTERED else placement.num_slices,
            phases=phases or (tuple(range(len(digits))),),
            lanes=lanes,
            by_exchange=scatters and placement.num_members % 2 == 1,
            options=OPTIONS[case.generation].get(case.verb, {}),
        )
        for lanes in rule.lanes
    )


def _digits(placement: Placement) -> tuple[Digit, ...]:
    if placement.group is not None and placement.group.digits:
        return placement.group.digits
    inner = placement.num_members
    if placement.extent is not Extent.SCATTERED:
        inner //= placement.num_slices
    return (Digit(axis=0, size=inner),)


def _scatter_phases(group: Group) -> tuple[tuple[int, ...], ...] | None:
    """Leave the shortest axis for last that makes the rest small enough, else the longest."""
    size = group.num_chips * group.num_cores
    if size <= _MOST_DEVICES_OF_ONE_SCATTER:
        return None
    axes = sorted(
        (digit.size, index) for index, digit in enumerate(group.digits) if digit.axis < CORE_AXIS
    )
    enough = [axis for axis in axes if size // axis[0] <= _MOST_DEVICES_OF_ONE_SCATTER]
    _, last = (enough or axes[-1:])[0]
    return tuple(index for index in range(len(group.digits)) if index != last), (last,)
