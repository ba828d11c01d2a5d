"""Which form a verb takes, and in chunks of what size: data, one table for each platform.

Bounds of the CPU table were measured by benchmarks/collectives.py: docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_dist.collectives.dtypes import Kind, WireType
from tpu_dist.collectives.forms import FORMS, Form
from tpu_dist.collectives.reducers import REDUCERS, Reducer

MIB = 1 << 20
_GRAIN = 1024  # elements; chunks that are multiples of it keep the payload's alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A form, and what it is for; the first rule of a verb's list that fits is taken.

    Attributes:
        chunk_bytes: what one program moves into a rank at most, all pieces together.
        max_bytes: payloads above take a later rule.
        max_ranks: larger groups take a later rule.
        commutes: only operations that are commutative to the bit: a product of complex numbers is
            not, where XLA contracts it.
        power_of_two: only groups of 2**k ranks.
        native: the jax.lax collectives that the form knows; empty: it takes any operation. Only
            dtypes that are not accumulated in a wider one are left to them.
        narrow: but for these.
        max_item_bytes: wider dtypes take a later rule.
    """

    form: str
    chunk_bytes: int
    max_bytes: int | None = None
    max_ranks: int | None = None
    commutes: bool = False
    power_of_two: bool = False
    native: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    max_item_bytes: int | None = None

    def fits(self, num_bytes: int, num_ranks: int, wire: WireType, reducer: Reducer | None) -> bool:
        """Whether this rule may be taken; the same on every rank."""
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            return False
        if self.max_ranks is not None and num_ranks > self.max_ranks:
            return False
        if self.max_item_bytes is not None and wire.carrier.itemsize > self.max_item_bytes:
            return False
        if self.power_of_two and num_ranks & (num_ranks - 1):
            return False
        if self.commutes and wire.kind is Kind.COMPLEX and reducer == REDUCERS["PRODUCT"]:
            return False
        if not self.native or reducer is None:
            return True
        is_wide = wire.accumulate is None or wire.name in self.narrow
        plain = is_wide and wire.kind in (Kind.FLOAT, Kind.INTEGER)
        return plain and reducer.native in self.native


_SUM = ("psum",)
_ANY = ("psum", "pmin", "pmax")

_CPU: Mapping[str, Sequence[Rule]] = {
    "all_reduce": (
        Rule(form="doubling", chunk_bytes=2 * MIB, commutes=True, max_ranks=2),
        Rule(form="doubling", chunk_bytes=2 * MIB, commutes=True, power_of_two=True, max_bytes=MIB),
        Rule(form="scatter_and_gather", chunk_bytes=8 * MIB),
    ),
    "all_gather": (Rule(form="spread", chunk_bytes=4 * MIB),),
    "reduce_scatter": (Rule(form="swap_and_reduce", chunk_bytes=4 * MIB),),
    "all_to_all": (Rule(form="swap", chunk_bytes=4 * MIB),),
    "gather": (Rule(form="collect", chunk_bytes=4 * MIB),),
    "scatter": (Rule(form="deal", chunk_bytes=4 * MIB),),
    "transfer": (Rule(form="deal", chunk_bytes=4 * MIB),),
    "broadcast": (Rule(form="hop", chunk_bytes=4 * MIB),),
}

# XLA's own collective wherever it has one, the whole payload at once: its tuned form, where it is
# known how the group stands (tuning.py). Sums of these two are kept in their own dtype from chip to
# chip, as between GPUs: twice the bytes else. Of 64-bit dtypes XLA has but the sum of all.
_NARROW = ("bfloat16", "float16")
_WHOLE = 1 << 40
_SOME = 256 * MIB  # where all ranks take in what one of them wants, or keep what all have sent
_TPU: Mapping[str, Sequence[Rule]] = {
    "all_reduce": (
        Rule(
            form="native_all_reduce",
            chunk_bytes=_WHOLE,
            native=_ANY,
            narrow=_NARROW,
            max_item_bytes=4,
        ),
        Rule(form="native_all_reduce", chunk_bytes=_WHOLE, native=_SUM),
        Rule(form="gather_and_reduce", chunk_bytes=_SOME),
    ),
    "all_gather": (Rule(form="native_all_gather", chunk_bytes=_WHOLE),),
    "reduce_scatter": (
        Rule(
            form="native_reduce_scatter",
            chunk_bytes=_WHOLE,
            native=_SUM,
            narrow=_NARROW,
            max_item_bytes=4,
        ),
        Rule(form="swap_and_reduce", chunk_bytes=_WHOLE),
    ),
    "all_to_all": (Rule(form="native_all_to_all", chunk_bytes=_WHOLE),),
    "gather": (Rule(form="native_all_gather", chunk_bytes=_SOME),),
    "scatter": (Rule(form="masked_scatter", chunk_bytes=_SOME),),
    "transfer": (Rule(form="deal", chunk_bytes=_WHOLE),),
    "broadcast": (Rule(form="masked_sum", chunk_bytes=_WHOLE),),
}

_GATHERING = ("spread", "native_all_gather", "gather_and_reduce")  # all pieces into each rank

PLANS: Mapping[str, Mapping[str, Sequence[Rule]]] = {"cpu": _CPU, "tpu": _TPU}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one payload is moved."""

    form: Form
    chunk_elements: int  # of one piece


def choose_plan(
    platform: str,
    verb: str,
    *,
    num_elements: int,
    element_bytes: int,
    num_ranks: int,
    wire: WireType,
    reducer: Reducer | None = None,
) -> Plan:
    """Choose by the platform's table; every rank of a group comes to the same plan.

    Args:
        platform: whose table: ``cpu`` or ``tpu``.
        verb: a key of the table.
        num_elements: of the largest piece that any rank sends to another.
        element_bytes: bytes of one element.
        num_ranks: of the group.
        wire: dtype of the elements.
        reducer: for the verbs that reduce.
    """
    num_bytes = num_elements * element_bytes
    rules = PLANS[platform][verb]
    rule = next(rule for rule in rules if rule.fits(num_bytes, num_ranks, wire, reducer))
    form = FORMS[rule.form]
    shares = form.num_operands(num_ranks) if form.pieces else 1
    if form.name in _GATHERING:
        shares = num_ranks - 1
    elements = rule.chunk_bytes // element_bytes // max(1, shares)
    return Plan(form, max(_GRAIN, elements // _GRAIN * _GRAIN))
