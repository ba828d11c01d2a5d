"""The plan tables: a rule for whatever c10d may ask, on both platforms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.collectives.dtypes import WIRE_TYPES, Kind, wire_type
from tpu_dist.collectives.envelope import VERBS
from tpu_dist.collectives.forms import FORMS
from tpu_dist.collectives.plans import PLANS, choose_plan
from tpu_dist.collectives.reducers import REDUCERS

REDUCING = {"all_reduce", "reduce_scatter"}
SIZES = [0, 1, 1024, 4097, 1 << 20, (2 << 20) + 1, (4 << 20) + 3, 1 << 31]
# reduce is an all_reduce that one rank keeps; a barrier moves nothing.
PLANNED = set(VERBS) - {"reduce", "barrier"}


@pytest.mark.parametrize("platform", PLANS)
def test_every_verb_that_moves_something_is_planned(platform: str) -> None:
    assert set(PLANS[platform]) == PLANNED


@pytest.mark.parametrize("platform", PLANS)
@pytest.mark.parametrize("verb", sorted(PLANNED))
def test_every_call_of_any_number_of_ranks_has_a_plan(platform: str, verb: str) -> None:
    for num_ranks in (*range(1, 65), 128, 257, 1000, 4096, 9216):
        for wire in WIRE_TYPES.values():
            defined = [r for r in REDUCERS.values() if wire.kind in r.kinds]
            for reducer in defined if verb in REDUCING else [None]:
                for num_elements in SIZES:
                    plan = choose_plan(
                        platform,
                        verb,
                        num_elements=num_elements,
                        element_bytes=wire.carrier.itemsize,
                        num_ranks=num_ranks,
                        wire=wire,
                        reducer=reducer,
                    )
                    where = f"{num_elements} of {wire.name} among {num_ranks} by {plan.form.name}"
                    assert plan.chunk_elements > 0, where
                    if plan.form.name == "doubling":
                        assert num_ranks & (num_ranks - 1) == 0, where
                    if plan.form.name == "native_all_reduce":
                        assert reducer is not None and reducer.native is not None, where


@pytest.mark.parametrize("platform", PLANS)
def test_every_rule_names_a_form_and_the_last_one_takes_everything(platform: str) -> None:
    for verb, rules in PLANS[platform].items():
        assert all(rule.form in FORMS for rule in rules)
        last = rules[-1]
        assert (last.max_bytes, last.max_ranks) == (None, None), verb
        assert not last.power_of_two and not last.native, verb


@given(
    st.sampled_from(sorted(PLANNED)),
    st.integers(1, 64),
    st.integers(1, 1 << 33),
)
def test_cpu_chunks_are_bounded_and_keep_their_alignment(
    verb: str, num_ranks: int, num_elements: int
) -> None:
    plan = choose_plan(
        "cpu",
        verb,
        num_elements=num_elements,
        element_bytes=4,
        num_ranks=num_ranks,
        wire=wire_type(torch.float32),
        reducer=REDUCERS["SUM"] if verb in REDUCING else None,
    )
    assert plan.chunk_elements * 4 <= 4 << 20
    assert plan.chunk_elements % 1024 == 0


def test_narrow_floats_are_summed_in_a_wider_dtype_but_for_half_floats_on_tpus() -> None:
    """Between chips as between GPUs: those are summed as they are."""
    halves = (torch.bfloat16, torch.float16)
    for platform, table in PLANS.items():
        for verb in REDUCING & set(table):
            for dtype in (*halves, torch.float8_e4m3fn):
                plan = choose_plan(
                    platform,
                    verb,
                    num_elements=1 << 20,
                    element_bytes=dtype.itemsize,
                    num_ranks=3,
                    wire=wire_type(dtype),
                    reducer=REDUCERS["SUM"],
                )
                natively = platform == "tpu" and dtype in halves
                assert natively == ("native" in plan.form.name)


@pytest.mark.parametrize("verb", sorted(REDUCING))
def test_a_native_reduce_scatter_is_a_sum(verb: str) -> None:
    """lax.psum_scatter knows no other operation."""
    for platform in PLANS:
        for reducer in REDUCERS.values():
            for wire in WIRE_TYPES.values():
                if wire.kind not in reducer.kinds or wire.kind is Kind.BOOL:
                    continue
                plan = choose_plan(
                    platform,
                    verb,
                    num_elements=1 << 20,
                    element_bytes=wire.carrier.itemsize,
                    num_ranks=3,
                    wire=wire,
                    reducer=reducer,
                )
                if plan.form.name == "native_reduce_scatter":
                    assert reducer.native == "psum"


def test_an_unknown_platform_or_verb_is_an_error() -> None:
    for platform, verb in (("gpu", "all_reduce"), ("cpu", "all_reduse")):
        with pytest.raises(KeyError):
            choose_plan(
                platform,
                verb,
                num_elements=1,
                element_bytes=4,
                num_ranks=2,
                wire=wire_type(torch.float32),
            )
