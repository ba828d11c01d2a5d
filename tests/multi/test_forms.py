"""Every form, run as a program by itself, moves and combines what its verb says.

The forms that only TPUs take by their plan are run here too, so that the tables may change.
"""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from ranks import RankPool, gloo_cannot
from torch import Tensor
from torch.testing import assert_close

pytestmark = gloo_cannot("it has no programs")

MEMBERS = {2: [3, 1], 3: [0, 2, 3], 4: [0, 1, 2, 3]}
"""Global ranks by number of them; the first in descending order."""

SIZE = 2048
ROOTED = {"collect", "deal", "hop", "masked_sum", "masked_scatter"}
REDUCING = {
    "swap_and_reduce", "scatter_and_gather", "doubling", "gather_and_reduce",
    "native_all_reduce", "native_reduce_scatter",
}  # fmt: skip


def piece(source: int, target: int, dtype: torch.dtype) -> Tensor:
    """What `source` has for `target`."""
    generator = torch.Generator().manual_seed(source * 10 + target)
    if dtype is torch.bool:
        return torch.randint(0, 2, (SIZE,), generator=generator).bool()
    return torch.randint(1, 4, (SIZE,), generator=generator).to(dtype)


def whole(source: int, dtype: torch.dtype) -> Tensor:
    """What `source` has for everybody."""
    return piece(source, 9, dtype)


def combined(name: str, rows: Sequence[Tensor]) -> Tensor:
    stack = torch.stack(list(rows))
    table: dict[str, Callable[[], Tensor]] = {
        "SUM": lambda: stack.any(0) if stack.dtype is torch.bool else stack.sum(0),
        "AVG": lambda: stack.sum(0) / len(stack),
        "PRODUCT": lambda: stack.prod(0),
        "MIN": lambda: stack.amin(0),
        "MAX": lambda: stack.amax(0),
        "BXOR": lambda: (
            stack[0] ^ combined("BXOR", list(stack[1:])) if len(stack) > 1 else stack[0]
        ),
    }
    return table[name]().to(stack.dtype)


Wanted = list[Tensor | None]
"""What each output holds; None where a rank takes nothing from it."""


def wanted(
    form: str, me: int, size: int, root: int | None, name: str, dtype: torch.dtype
) -> Wanted:
    ranks = range(size)
    back = [(me - k) % size for k in range(1, size)]  # who relative outputs come from
    if form == "spread":
        return [whole(source, dtype) for source in back]
    if form == "swap":
        return [piece(source, me, dtype) for source in back]
    if form == "collect":
        return [whole(source, dtype) if me == root else None for source in back]
    if form == "deal":
        assert root is not None
        return [piece(root, me, dtype) if source == root else None for source in back]
    if form == "masked_sum":
        assert root is not None
        return [whole(root, dtype)]
    if form == "masked_scatter":
        assert root is not None
        return [piece(root, me, dtype)]
    if form == "native_all_gather":
        return [whole(source, dtype) for source in ranks]
    if form == "native_all_to_all":
        return [piece(source, me, dtype) for source in ranks]
    if form == "scatter_and_gather":
        owners = [me, *back]
        return [combined(name, [piece(s, owner, dtype) for s in ranks]) for owner in owners]
    if form in ("swap_and_reduce", "native_reduce_scatter"):
        return [combined(name, [piece(source, me, dtype) for source in ranks])]
    return [combined(name, [whole(source, dtype) for source in ranks])]


def run_form(rank: int, form_name: str, size: int, name: str, dtype: torch.dtype) -> None:
    from tpu_dist.collectives.border import carry, copy_out, to_array
    from tpu_dist.collectives.dtypes import wire_type
    from tpu_dist.collectives.forms import FORMS, arrival_step, num_steps
    from tpu_dist.collectives.programs import Programs
    from tpu_dist.collectives.reducers import reducer_for
    from tpu_dist.runtime.runtime import current_runtime

    members = MEMBERS[size]
    if rank not in members:
        return
    me = members.index(rank)
    runtime = current_runtime()
    assert runtime is not None
    programs = Programs([runtime.devices[member] for member in members], runtime.device)
    form, wire = FORMS[form_name], wire_type(dtype)
    reducer = reducer_for(name, wire) if form_name in REDUCING else None
    if form.pieces:
        first = 0 if form.own or not form.relative else 1
        targets = [(me + k) % size if form.relative else k for k in range(first, size)]
        tensors = [piece(me, target, dtype) for target in targets]
    else:
        tensors = [whole(me, dtype)]
    assert len(tensors) == form.num_operands(size)
    before = [tensor.clone() for tensor in tensors]
    roots = range(size) if form_name in ROOTED else [None]
    for root, step in itertools.product(roots, range(num_steps(size) if form_name == "hop" else 1)):
        program = programs.get(form, size=SIZE, wire=wire, reducer=reducer, root=root, step=step)
        outputs = program([to_array(carry(t, wire), runtime.device) for t in tensors])
        found = []
        for output in outputs:
            found.append(torch.empty(output.size, dtype=dtype))
            copy_out(output, carry(found[-1], wire), runtime.device)
        where = f"{form_name} {name} of {dtype}, rank {me} of {size}, root {root}, step {step}"
        if form_name == "hop":
            assert root is not None
            if arrival_step((me - root) % size) == step:
                assert_close(found[0], whole((me - (1 << step)) % size, dtype), msg=where)
            continue
        expected = wanted(form_name, me, size, root, name, dtype)
        assert len(found) == len(expected), where
        for one, other in zip(found, expected, strict=True):
            if other is not None:
                assert_close(one, other, msg=lambda text, w=where: f"{w}: {text}")
    assert all(t.equal(b) for t, b in zip(tensors, before, strict=True)), (
        "an operand was written to"
    )


CASES = [
    ("spread", "", torch.float32),
    ("swap", "", torch.uint8),
    ("collect", "", torch.int64),
    ("deal", "", torch.float32),
    ("hop", "", torch.uint8),
    ("native_all_gather", "", torch.float32),
    ("native_all_to_all", "", torch.uint8),
    ("swap_and_reduce", "SUM", torch.bfloat16),
    ("swap_and_reduce", "MAX", torch.int32),
    ("swap_and_reduce", "AVG", torch.float64),
    ("scatter_and_gather", "SUM", torch.float32),
    ("scatter_and_gather", "AVG", torch.bfloat16),
    ("scatter_and_gather", "MAX", torch.int32),
    ("doubling", "SUM", torch.float32),
    ("doubling", "MIN", torch.float16),
    ("doubling", "BXOR", torch.int16),
    ("gather_and_reduce", "PRODUCT", torch.int32),
    ("gather_and_reduce", "SUM", torch.bool),
    ("native_all_reduce", "SUM", torch.float32),
    ("native_all_reduce", "AVG", torch.float32),
    ("native_all_reduce", "MAX", torch.int32),
    ("native_all_reduce", "MIN", torch.int64),
    ("native_reduce_scatter", "SUM", torch.float32),
    ("native_reduce_scatter", "AVG", torch.float64),
    ("masked_sum", "", torch.int32),
    ("masked_scatter", "", torch.uint8),
]


def test_every_form_is_tested() -> None:
    from tpu_dist.collectives.forms import FORMS

    assert {form for form, _, _ in CASES} == set(FORMS)


@pytest.mark.parametrize(("form", "name", "dtype"), CASES, ids=str)
def test_a_form_gives_what_its_verb_says(
    pool4: RankPool, form: str, name: str, dtype: torch.dtype
) -> None:
    for size in MEMBERS:
        if form != "doubling" or size != 3:
            pool4(run_form, form, size, name, dtype)


def programs_are_kept(rank: int) -> None:
    """A second look-up compiles nothing, also where threads look at once."""
    from concurrent.futures import ThreadPoolExecutor

    from tpu_dist.collectives.dtypes import wire_type
    from tpu_dist.collectives.forms import FORMS
    from tpu_dist.collectives.programs import Programs
    from tpu_dist.runtime.runtime import current_runtime

    runtime = current_runtime()
    assert runtime is not None
    programs = Programs(runtime.devices, runtime.device)
    wire = wire_type(torch.float32)
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: programs.get(FORMS["spread"], size=64, wire=wire), range(8))
        )
    assert len({id(program) for program in found}) == 1
    assert programs.get(FORMS["spread"], size=128, wire=wire) is not found[0]


def test_a_program_is_compiled_once(pool4: RankPool) -> None:
    pool4(programs_are_kept)
