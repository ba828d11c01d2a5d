"""Every collective verb against torch, over dtypes, operations, shapes, views and sizes.

Each rank can make each rank's input, so what is wanted is worked out with plain tensors. Values
are small integers: their sums and products are exact, in whatever order they are taken.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceCoalescedOptions, AllreduceOptions
from torch.testing import assert_close

pytestmark = gloo_cannot("it lacks dtypes and operations, and is wrong on strided views")

Make = Callable[[int], Tensor]
"""The input of a group rank."""

ReduceOp = dist.ReduceOp
NUMBERS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]
BITS = ["BAND", "BOR", "BXOR"]
FLOATS = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]
OPERATIONS = {
    **dict.fromkeys(FLOATS, NUMBERS),
    **dict.fromkeys(INTEGERS, NUMBERS + BITS),
    **dict.fromkeys(COMPLEX, ["SUM", "AVG", "PRODUCT"]),
    torch.bool: ["SUM", "PRODUCT", "MIN", "MAX", *BITS],
}
GROUPS = {2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}
"""By size; the ranks of the pool that are left out have nothing to do."""

INLINE = 1024
"""Elements of float32 that fit into an envelope."""
CHUNK = (4 << 20) // 4
"""Elements of float32 that one program moves at most."""
LARGE = (9 << 20) // 4 + 3

_groups: dict[int, dist.ProcessGroup] = {}


def group_of(size: int) -> tuple[dist.ProcessGroup, int]:
    """In a rank: the group of that size, and this rank's place in it, -1 outside."""
    if size not in _groups:
        for each, ranks in GROUPS.items():
            if each not in _groups:
                _groups[each] = dist.new_group(ranks)
    group = _groups[size]
    return group, dist.get_rank(group)


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype, low: int = 0) -> Tensor:
    """Small integers, of which 0 is rare; negative ones where the dtype has them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    signed = dtype.is_floating_point or dtype.is_complex or dtype in INTEGERS[:4]
    whole = torch.randint(-2 if signed else low, 3, shape, generator=generator)
    if dtype.is_complex:
        other = torch.randint(-2, 3, shape, generator=generator)
        return torch.complex(whole.double(), other.double()).to(dtype)
    return whole.to(dtype)


def wide(tensor: Tensor) -> Tensor:
    """In a dtype that torch computes every operation in."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)


def reduced(name: str, tensors: list[Tensor]) -> Tensor:
    """What the operation makes of everybody's tensors."""
    dtype = tensors[0].dtype
    stack = torch.stack([wide(tensor) for tensor in tensors])
    if dtype is torch.bool:
        table: dict[str, Callable[[], Tensor]] = {
            "SUM": lambda: stack.any(0),
            "MAX": lambda: stack.any(0),
            "BOR": lambda: stack.any(0),
            "PRODUCT": lambda: stack.all(0),
            "MIN": lambda: stack.all(0),
            "BAND": lambda: stack.all(0),
            "BXOR": lambda: stack.sum(0) % 2 == 1,
        }
        return table[name]()
    table = {
        "SUM": lambda: stack.sum(0),
        "PRODUCT": lambda: stack.prod(0),
        "MIN": lambda: stack.amin(0),
        "MAX": lambda: stack.amax(0),
        "AVG": lambda: (
            stack.sum(0) / len(tensors)
            if dtype.is_floating_point or dtype.is_complex
            else stack.sum(0).div(len(tensors), rounding_mode="trunc")
        ),
        "BAND": lambda: folded(torch.bitwise_and, stack),
        "BOR": lambda: folded(torch.bitwise_or, stack),
        "BXOR": lambda: folded(torch.bitwise_xor, stack),
    }
    return narrow(table[name](), dtype)


def narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point and dtype.itemsize < 4:
        tensor = tensor.float()  # what narrow floats are accumulated in
    return tensor.to(dtype)


def folded(function: Callable[[Tensor, Tensor], Tensor], stack: Tensor) -> Tensor:
    total = stack[0]
    for row in stack[1:]:
        total = function(total, row)
    return total


def assert_same(found: Tensor, wanted: Tensor, what: str, *, exact: bool = True) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    tolerance = {} if not exact else {"rtol": 0, "atol": 0}
    narrowest = found.is_floating_point() and found.dtype.itemsize == 1
    if narrowest or found.dtype in (torch.uint16, torch.uint32, torch.uint64):
        found, wanted = wide(found), wide(wanted)
    assert_close(found, wanted, msg=lambda text: f"{what}: {text}", **tolerance)


def same_bits_everywhere(tensor: Tensor, group: dist.ProcessGroup, what: str) -> None:
    """All ranks hold the same, to the bit."""
    own = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    hashes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hashes, hash_of(own), group=group)
    assert len(set(hashes)) == 1, f"{what}: the ranks hold different bits"


def hash_of(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


# --- operations and dtypes


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    """dist.all_reduce looks at complex tensors as real ones, and so refuses their products."""
    options = AllreduceOptions()
    options.reduceOp = op
    group.allreduce([tensor], options).wait()


def check_operations(rank: int, size: int, dtype: torch.dtype, names: list[str], n: int) -> None:
    group, me = group_of(size)
    if me < 0:
        return
    inputs = [values(r, (n,), dtype) for r in range(size)]
    for name in names:
        op = getattr(ReduceOp, name)
        what = f"{name} of {n} {dtype} on {size} ranks"
        wanted = reduced(name, inputs)
        exact = not (name == "AVG" and size == 3)  # x * (1/3) is as good as x / 3
        found = inputs[me].clone()
        all_reduce(found, op, group)
        assert_same(found, wanted, f"all_reduce {what}", exact=exact)
        same_bits_everywhere(found, group, f"all_reduce {what}")

        found = inputs[me].clone()
        dist.reduce(found, group_dst=size - 1, op=op, group=group)
        kept = wanted if me == size - 1 else inputs[me]
        assert_same(found, kept, f"reduce {what}", exact=exact)

        shares = [values(100 + r, (size, n), dtype) for r in range(size)]
        share = torch.empty(n, dtype=dtype)
        own = shares[me].clone()
        dist.reduce_scatter_single(share, own, op, group=group)
        parts = reduced(name, shares)
        assert_same(share, parts[me], f"reduce_scatter {what}", exact=exact)
        assert_same(own, shares[me], f"input of reduce_scatter {what}")


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("dtype", OPERATIONS, ids=str)
def test_every_operation_on_every_dtype_small(
    pool4: RankPool, dtype: torch.dtype, size: int
) -> None:
    pool4(check_operations, size, dtype, OPERATIONS[dtype], 7)


@pytest.mark.parametrize("dtype", OPERATIONS, ids=str)
def test_sums_of_every_dtype_by_programs(pool4: RankPool, dtype: torch.dtype) -> None:
    pool4(check_operations, 4, dtype, ["SUM"], 4099)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_every_operation_by_programs(pool4: RankPool, dtype: torch.dtype, size: int) -> None:
    pool4(check_operations, size, dtype, OPERATIONS[dtype], 4099)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64, torch.float8_e5m2], ids=str)
def test_carried_dtypes_by_programs(pool4: RankPool, dtype: torch.dtype) -> None:
    pool4(check_operations, 3, dtype, [n for n in OPERATIONS[dtype] if n != "SUM"], 4099)


def premultiplied(rank: int, n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        inputs = [values(r, (n,), dtype) for r in range(4)]
        for factor in (0.5, -4.0):
            op = dist._make_nccl_premul_sum(factor)
            found = inputs[rank].clone()
            dist.all_reduce(found, op)
            wanted = narrow(sum(wide(x) * factor for x in inputs), dtype)  # type: ignore[arg-type]
            assert_same(found, wanted, f"PREMUL_SUM {factor} of {dtype}")
            shares = [values(10 + r, (4, n), dtype) for r in range(4)]
            share = torch.empty(n, dtype=dtype)
            dist.reduce_scatter_single(share, shares[rank], op)
            parts = narrow(sum(wide(x) * factor for x in shares), dtype)  # type: ignore[arg-type]
            assert_same(share, parts[rank], f"reduce_scatter PREMUL_SUM {factor} of {dtype}")


@pytest.mark.parametrize("n", [5, 4099])
def test_sums_with_a_factor(pool4: RankPool, n: int) -> None:
    pool4(premultiplied, n)


def rounded(rank: int, size: int, dtype: torch.dtype, name: str, n: int) -> None:
    """Values whose sums do not come out even: all ranks must round alike."""
    group, me = group_of(size)
    if me < 0:
        return
    generator = torch.Generator().manual_seed(me)
    tensor = torch.randn(n, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        other = torch.randn(n, generator=generator, dtype=torch.float64)
        found = torch.complex(tensor, other).to(dtype)
    else:
        found = tensor.to(dtype)
    all_reduce(found, getattr(ReduceOp, name), group)
    same_bits_everywhere(found, group, f"{name} of {n} {dtype} on {size} ranks")


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("n", [100, 5000, 700_001])
def test_rounded_results_are_the_same_to_the_bit_on_all_ranks(
    pool4: RankPool, n: int, size: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool4(rounded, size, dtype, "SUM", n)
    pool4(rounded, size, torch.float32, "PRODUCT", n)
    pool4(rounded, size, torch.complex64, "PRODUCT", n)
    pool4(rounded, size, torch.float32, "AVG", n)


def special_values(rank: int, size: int, n: int) -> None:
    """NaN, infinities and the two zeros, in all pairs."""
    group, me = group_of(size)
    if me < 0:
        return
    kinds = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0])
    inputs = [kinds[torch.arange(n) // 6**r % 6] for r in range(size)]
    stack = torch.stack(inputs)
    wanted = {"SUM": stack.sum(0), "MIN": stack.amin(0), "MAX": stack.amax(0)}
    for name, result in wanted.items():
        found = inputs[me].clone()
        dist.all_reduce(found, getattr(ReduceOp, name), group=group)
        assert_close(found, result, equal_nan=True, rtol=0, atol=0, msg=lambda t, n=name: n + t)
        signs = found.signbit() & ~found.isnan()
        same_bits_everywhere(signs, group, f"signs of {name} of {n} on {size} ranks")


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("n", [216, 5184, 700_001])
def test_nan_infinities_and_zeros_are_treated_alike_at_every_size(
    pool4: RankPool, n: int, size: int
) -> None:
    pool4(special_values, size, n)


# --- shapes and views

VIEWS: dict[str, Callable[[int], Tensor]] = {
    "0-d": lambda r: torch.tensor(float(r + 1)),
    "one": lambda r: torch.full((1,), r + 1.0),
    "empty": lambda r: torch.empty(0),
    "empty 2-d": lambda r: torch.empty(4, 0),
    "matrix": lambda r: values(r, (4, 6), torch.float32),
    "transposed": lambda r: values(r, (4, 6), torch.float32).t(),
    "strided": lambda r: values(r, (8, 9), torch.float32)[::2, ::3],
    "offset": lambda r: values(r, (30,), torch.float32)[3:27],
    "channels last": lambda r: values(r, (4, 2, 3, 5), torch.float32).to(
        memory_format=torch.channels_last
    ),
    "conj": lambda r: values(r, (4, 6), torch.complex64).conj(),
    "neg": lambda r: values(r, (4, 6), torch.complex64).conj().imag,
    "requires grad": lambda r: values(r, (4, 6), torch.float32).requires_grad_(),
    "large strided": lambda r: values(r, (4, 3000), torch.float32)[:, ::2],
    "large conj": lambda r: values(r, (4, 1001), torch.complex64).conj(),
    "large transposed": lambda r: values(r, (1024, 4), torch.float32).t(),
    "large offset": lambda r: values(r, (5003,), torch.float32)[3:],
}


def blank(like: Tensor) -> Tensor:
    """A tensor with the same view of memory, to be filled."""
    with torch.no_grad():
        copy = like.detach().clone(memory_format=torch.preserve_format)
        if like.is_conj():
            copy = torch.conj(copy.resolve_conj().contiguous())
        elif not like.is_contiguous() and like.dim() == 2:
            copy = like.new_zeros(like.shape[0], 2 * like.shape[1])[:, ::2]
        copy.fill_(77)
    return copy


def rowed(make: Make, rank: int, size: int) -> Tensor:
    """A tensor with `size` rows in it, each of the view's."""
    return torch.stack([make(rank * size + row) for row in range(size)]).detach()


def resolved(make: Make) -> Make:
    """torch looks at complex tensors as real ones in most verbs, and cannot where conj is due."""
    return lambda r: make(r).resolve_conj()


def views_of_conj(me: int, size: int, group: Any, make: Make, what: str) -> None:
    """The verbs that conj views come to as they are."""
    inputs = [make(r) for r in range(size)]
    total = torch.stack([each.resolve_conj() for each in inputs]).sum(0)
    found = make(me)
    all_reduce(found, ReduceOp.SUM, group)
    assert found.is_conj()
    assert_same(found, total, f"all_reduce {what}")
    found = make(me)
    dist.reduce(found, group_dst=0, group=group)
    assert_same(found, total if me == 0 else inputs[me], f"reduce {what}")
    outputs = [blank(each) for each in inputs] if me == 0 else None
    dist.gather(make(me), outputs, group_dst=0, group=group)
    for output, each in zip(outputs or [], inputs, strict=False):
        assert_same(output, each, f"gather {what}")
    share = blank(inputs[me])
    dist.reduce_scatter(share, [make(me)] * size, group=group)
    assert_same(share, total, f"reduce_scatter {what}")
    joined = blank(torch.cat(inputs).conj())
    group.all_gather_single(joined, make(me), AllgatherOptions()).wait()
    assert_same(joined, torch.cat(inputs), f"all_gather_single {what}")


def whole_verbs(me: int, size: int, group: Any, make: Make, what: str, later: bool) -> None:
    inputs = [make(r) for r in range(size)]

    def run(function: Callable[..., Any], *args: Any, **more: Any) -> None:
        work = function(*args, group=group, async_op=later, **more)
        assert (work is not None) == later
        if later:
            assert work.wait() and work.is_completed()

    wanted = torch.stack(inputs).detach().sum(0)
    found = make(me)
    run(dist.all_reduce, found)
    assert_same(found.detach(), wanted, f"all_reduce {what}")

    for root in {0, size - 1}:
        found = make(me)
        run(dist.broadcast, found, group_src=root)
        assert_same(found.detach(), inputs[root].detach(), f"broadcast {what} from {root}")
        found = make(me)
        run(dist.reduce, found, group_dst=root)
        kept = wanted if me == root else inputs[me].detach()
        assert_same(found.detach(), kept, f"reduce {what} to {root}")

        outputs = [blank(t) for t in inputs] if me == root else None
        own = make(me)
        run(dist.gather, own, outputs, group_dst=root)
        assert_same(own.detach(), inputs[me].detach(), f"input of gather {what}")
        for output, each in zip(outputs or [], inputs, strict=False):
            assert_same(output, each.detach(), f"gather {what} to {root}")

        output = blank(inputs[me])
        sent = [make(r) for r in range(size)] if me == root else None
        run(dist.scatter, output, sent, group_src=root)
        assert_same(output, inputs[me].detach(), f"scatter {what} from {root}")

    outputs = [blank(t) for t in inputs]
    own = make(me)
    run(dist.all_gather, outputs, own)
    for output, each in zip(outputs, inputs, strict=True):
        assert_same(output, each.detach(), f"all_gather {what}")
    assert_same(own.detach(), inputs[me].detach(), f"input of all_gather {what}")

    lists = [[make(r * size + k) for k in range(size)] for r in range(size)]
    outputs = [blank(t) for t in lists[me]]
    run(dist.all_to_all, outputs, lists[me])
    for r, output in enumerate(outputs):
        assert_same(output, lists[r][me].detach(), f"all_to_all {what}")

    output = blank(inputs[me])
    run(dist.reduce_scatter, output, lists[me])
    mine = torch.stack([each[me] for each in lists]).detach().sum(0)
    assert_same(output, mine, f"reduce_scatter {what}")


def single_verbs(me: int, size: int, group: Any, make: Make, what: str) -> None:
    inputs = [make(r).detach() for r in range(size)]
    stacked = blank(rowed(make, 0, size))
    dist.all_gather_single(stacked, make(me), group=group)
    assert_same(stacked, torch.stack(inputs), f"all_gather_single, stacked, {what}")

    rows = [rowed(make, r, size) for r in range(size)]
    share = blank(inputs[me])
    own = rows[me].clone()
    dist.reduce_scatter_single(share, own, group=group)
    wanted = torch.stack([row[me] for row in rows]).sum(0)
    assert_same(share, wanted, f"reduce_scatter_single {what}")
    assert_same(own, rows[me], f"input of reduce_scatter_single {what}")

    output = blank(rows[me])
    dist.all_to_all_single(output, rows[me], group=group)
    wanted = torch.stack([row[me] for row in rows])
    assert_same(output, wanted, f"all_to_all_single {what}")

    if inputs[0].dim() and inputs[0].numel():
        joined = blank(torch.cat(inputs))
        dist.all_gather_single(joined, make(me), group=group)
        assert_same(joined, torch.cat(inputs), f"all_gather_single, concatenated, {what}")


def check_view(rank: int, size: int, view: str, later: bool) -> None:
    group, me = group_of(size)
    if me < 0:
        return
    check_verbs(me, size, group, view, later)


def check_verbs(me: int, size: int, group: Any, view: str, later: bool) -> None:
    what = f"of {view} on {size} ranks"
    make = VIEWS[view]
    if make(0).is_conj():
        views_of_conj(me, size, group, make, what)
        make = resolved(make)
    whole_verbs(me, size, group, make, what, later)
    single_verbs(me, size, group, make, what)


@pytest.mark.parametrize("view", VIEWS)
def test_every_verb_on_every_view(pool4: RankPool, view: str) -> None:
    pool4(check_view, 4, view, False)
    pool4(check_view, 3, view, True)
    if view in ("matrix", "large strided"):
        pool4(check_view, 2, view, False)


def check_size(rank: int, size: int, n: int) -> None:
    group, me = group_of(size)
    if me < 0:
        return
    inputs = [values(r, (n,), torch.float32) for r in range(size)]
    found = inputs[me].clone()
    dist.all_reduce(found, group=group)
    assert_same(found, torch.stack(inputs).sum(0), f"all_reduce of {n}")
    found = inputs[me].clone()
    dist.broadcast(found, group_src=size - 1, group=group)
    assert_same(found, inputs[-1], f"broadcast of {n}")
    outputs = torch.empty(size, n)
    dist.all_gather_single(outputs, inputs[me], group=group)
    assert_same(outputs, torch.stack(inputs), f"all_gather of {n}")
    rows = [values(9 + r, (size, n), torch.float32) for r in range(size)]
    share = torch.empty(n)
    dist.reduce_scatter_single(share, rows[me], group=group)
    assert_same(share, torch.stack(rows).sum(0)[me], f"reduce_scatter of {n}")
    outputs = torch.empty(size, n)
    dist.all_to_all_single(outputs, rows[me], group=group)
    assert_same(outputs, torch.stack([row[me] for row in rows]), f"all_to_all of {n}")
    pieces = [torch.empty(n) for _ in range(size)] if me == 0 else None
    dist.gather(inputs[me], pieces, group_dst=0, group=group)
    for piece, each in zip(pieces or [], inputs, strict=False):
        assert_same(piece, each, f"gather of {n}")
    found = torch.empty(n)
    dist.scatter(found, list(rows[0]) if me == 0 else None, group_src=0, group=group)
    assert_same(found, rows[0][me], f"scatter of {n}")


@pytest.mark.parametrize("n", [INLINE - 1, INLINE, INLINE + 1, INLINE // 4, INLINE // 4 + 1])
def test_sizes_around_what_fits_into_an_envelope(pool4: RankPool, n: int) -> None:
    for size in GROUPS:
        pool4(check_size, size, n)


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK + 1, LARGE])
def test_sizes_around_what_one_program_moves(pool4: RankPool, n: int) -> None:
    for size in (2, 3):
        pool4(check_size, size, n)


def one_large_and_the_rest_small(rank: int) -> None:
    """Ranks whose own payload would fit into an envelope must go the long way with the others."""
    counts = [5, 0, 3000, 1]
    lists = [values(r, (count,), torch.float32) for r, count in enumerate(counts)]
    outputs = [torch.empty(count) for count in counts]
    dist.all_gather(outputs, lists[rank])
    for output, each in zip(outputs, lists, strict=True):
        assert_same(output, each, "uneven all_gather")
    table = [[0, 2, 3, 1], [4000, 0, 0, 2], [1, 1, 1, 1], [0, 0, 0, 5000]]
    sent = [values(rank * 4 + r, (count,), torch.int32) for r, count in enumerate(table[rank])]
    received = [torch.empty(table[r][rank], dtype=torch.int32) for r in range(4)]
    dist.all_to_all(received, sent)
    for r, output in enumerate(received):
        wanted = values(r * 4 + rank, (table[r][rank],), torch.int32)
        assert_same(output, wanted, "uneven all_to_all")
    rows = [values(rank * 4 + r, (count, 2), torch.float32) for r, count in enumerate(table[rank])]
    joined = torch.empty(sum(table[r][rank] for r in range(4)), 2)
    incoming = [table[r][rank] for r in range(4)]
    dist.all_to_all_single(joined, torch.cat(rows), incoming, table[rank])
    wanted = torch.cat(
        [values(r * 4 + rank, (n, 2), torch.float32) for r, n in enumerate(incoming)]
    )
    assert_same(joined, wanted, "uneven all_to_all_single")
    shares = [values(rank * 4 + r, (counts[r],), torch.float32) for r in range(4)]
    share = torch.empty(counts[rank])
    dist.reduce_scatter(share, shares)
    parts = [values(r * 4 + rank, (counts[rank],), torch.float32) for r in range(4)]
    assert_same(share, torch.stack(parts).sum(0), "uneven reduce_scatter")


def test_pieces_of_different_sizes_some_empty_some_large(pool4: RankPool) -> None:
    pool4(one_large_and_the_rest_small)


def alone(rank: int) -> None:
    """A group of one rank does all of it by itself."""
    group = [dist.new_group([r]) for r in range(4)][rank]
    for view in VIEWS:
        check_verbs(0, 1, group, view, later=view == "matrix")
    dist.barrier(group)


def test_a_group_of_one_serves_every_verb(pool4: RankPool) -> None:
    pool4(alone)


# --- several at once


def coalesced(rank: int, n: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    shapes = [(n,), (2, n), (), (0,), (n + 1,)]
    inputs = [
        [values(10 * r + k, s, torch.float32) for k, s in enumerate(shapes)] for r in range(4)
    ]
    sums = [torch.stack(each).sum(0) for each in zip(*inputs, strict=True)]

    def check(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
        for k, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{what}, tensor {k} of {n}")

    own = [tensor.clone() for tensor in inputs[rank]]
    options = AllreduceCoalescedOptions()
    options.reduceOp = ReduceOp.SUM
    group.allreduce_coalesced(own, options).wait()
    check(own, sums, "allreduce_coalesced")

    own = [tensor.clone() for tensor in inputs[rank]]
    with dist._coalescing_manager():
        for tensor in own:
            dist.all_reduce(tensor)
    check(own, sums, "all_reduce in a manager")

    outputs = [torch.empty(4, *shape) for shape in shapes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(outputs, inputs[rank], strict=True):
            dist.all_gather_single(output, tensor)
    manager.wait()
    check(outputs, [torch.stack(each) for each in zip(*inputs, strict=True)], "all_gather_single")

    shares = [torch.empty(shape) for shape in shapes]
    rows = [[torch.stack([t + r for r in range(4)]) for t in each] for each in inputs]
    with dist._coalescing_manager():
        for share, row in zip(shares, rows[rank], strict=True):
            dist.reduce_scatter_single(share, row)
    wanted = [torch.stack([row[k][rank] for row in rows]).sum(0) for k in range(len(shapes))]
    check(shares, wanted, "reduce_scatter_single")

    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        own = [tensor.clone() for tensor in inputs[rank]]
        works = [group.allreduce([tensor], AllreduceOptions()) for tensor in own]
    manager.wait()
    assert all(work.is_completed() for work in works)
    check(own, sums, "works between start and end of coalescing")

    lists = [[torch.empty(shape) for shape in shapes] for _ in range(4)]
    group.allgather_coalesced(lists, inputs[rank], AllgatherOptions()).wait()
    for r in range(4):
        check(lists[r], inputs[r], f"allgather_coalesced, rank {r}")


@pytest.mark.parametrize("n", [3, 2000])
def test_several_tensors_in_one_call(pool4: RankPool, n: int) -> None:
    pool4(coalesced, n)


def objects(rank: int) -> None:
    mine = {
        "rank": rank,
        "text": "x" * (10 if rank % 2 else 20_000),
        "tensor": torch.ones(3) * rank,
    }
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, mine)
    assert [each["rank"] for each in gathered] == [0, 1, 2, 3]
    assert [len(each["text"]) for each in gathered] == [20_000, 10, 20_000, 10]
    assert all(each["tensor"].eq(r).all() for r, each in enumerate(gathered))

    collected: list[Any] | None = [None] * 4 if rank == 2 else None
    dist.gather_object(mine, collected, dst=2)
    assert collected is None or [each["rank"] for each in collected] == [0, 1, 2, 3]

    shared: list[Any] = [mine, "second", None] if rank == 1 else [None] * 3
    dist.broadcast_object_list(shared, src=1)
    assert shared[0]["rank"] == 1 and shared[1:] == ["second", None]

    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [f"for {r}" for r in range(4)] if rank == 3 else None, src=3)
    assert dealt == [f"for {rank}"]

    if rank == 0:
        dist.send_object_list([mine, 7], dst=1)
    elif rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, src=0)
        assert received[0]["rank"] == 0 and received[1] == 7


def test_objects(pool4: RankPool) -> None:
    pool4(objects)


def sparse(rank: int) -> None:
    def of(r: int) -> Tensor:
        dense = values(r, (6, 5, 3), torch.float32) * (values(50 + r, (6, 5, 1), torch.bool))
        return dense.to_sparse(2) if r != 2 else torch.zeros(6, 5, 3).to_sparse(2)

    wanted = torch.stack([of(r).to_dense() for r in range(4)]).sum(0)
    found = of(rank)
    dist.all_reduce(found)
    assert found.is_sparse and found.is_coalesced()
    assert_same(found.to_dense(), wanted, "all_reduce of a sparse tensor")
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1, 4]]), torch.tensor([1.0, 2.0, 3.0]), (6,))
    dist.all_reduce(twice)  # it is not coalesced
    assert_same(twice.to_dense(), torch.tensor([0.0, 12, 0, 0, 12, 0]), "an uncoalesced tensor")
    many = torch.sparse_coo_tensor(torch.arange(5000)[None], torch.ones(5000) * rank, (9000,))
    work = dist.all_reduce(many, async_op=True)
    work.wait()
    assert_same(many.to_dense()[:5000], torch.full((5000,), 6.0), "a large sparse tensor")
    for op in (ReduceOp.MAX, ReduceOp.AVG):
        with pytest.raises(RuntimeError, match="sparse tensors: only ReduceOp.SUM"):
            dist.all_reduce(of(rank), op)


def test_sparse_tensors_are_summed(pool4: RankPool) -> None:
    pool4(sparse)


def barriers(rank: int) -> float:
    """The time at which this rank left a barrier that the last rank came late to."""
    import time

    dist.barrier()
    came = time.monotonic() if rank == 3 else 0.0
    if rank == 3:
        time.sleep(0.2)
        came = time.monotonic()
    dist.barrier()
    left = time.monotonic()
    return came if rank == 3 else left


def test_nobody_leaves_a_barrier_before_the_last_has_come(pool4: RankPool) -> None:
    *left, came = pool4(barriers)
    assert min(left) >= came


# --- what a rank sees by itself


def refused(rank: int) -> None:
    """Mistakes that every rank can see by itself; nothing is sent, the group lives on."""
    x = torch.ones(4)
    shared = torch.zeros(1).expand(4)
    meta = torch.empty(4, device="meta")
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: dist.all_reduce(meta), ValueError, "meta"),
        (lambda: dist.reduce(x.to(torch.complex32), 0), RuntimeError, "complex32"),
        (lambda: dist.all_reduce(x.bool(), ReduceOp.AVG), RuntimeError, "AVG is not defined"),
        (lambda: dist.all_reduce(x, ReduceOp.BAND), RuntimeError, "BAND is not defined"),
        (lambda: dist.all_gather([x] * 3, x), ValueError, "each of the 4 ranks, got 3"),
        (lambda: dist.all_gather_single(torch.empty(15), x), ValueError, "16 are needed"),
        (lambda: dist.reduce_scatter_single(torch.empty(3), x), ValueError, "12 are needed"),
        (lambda: dist.all_to_all_single(torch.empty(5), torch.ones(5)), ValueError, "divided"),
        (lambda: dist.all_to_all_single(torch.empty(4), x, [1] * 4, [2] * 4), ValueError, "sum up"),
        (lambda: dist.all_reduce(shared), ValueError, "share memory|overlap"),
        (lambda: dist.broadcast(shared, 0), ValueError, "share memory|overlap"),
        (lambda: dist.all_gather([x, x, x, shared], x), ValueError, "share memory|overlap"),
        (lambda: dist.irecv(shared, src=(rank + 1) % 4), ValueError, "share memory|overlap"),
    ]
    for call, kind, said in cases:
        with pytest.raises(kind, match=said):
            call()
    dist.all_reduce(x)
    assert x.eq(4).all()


def test_what_one_rank_can_see_to_be_wrong_is_refused_there(pool4: RankPool) -> None:
    pool4(refused)


def expanded_inputs(rank: int) -> None:
    """Inputs may share memory between elements; only outputs may not."""
    source = torch.full((1,), float(rank)).expand(3000)
    outputs = torch.empty(4, 3000)
    dist.all_gather_single(outputs, source)
    assert outputs.eq(torch.arange(4.0)[:, None]).all()
    share = torch.empty(750)
    dist.reduce_scatter_single(share, source)
    assert share.eq(6).all()


def test_inputs_may_be_expanded(pool4: RankPool) -> None:
    pool4(expanded_inputs)


def snapshot(rank: int) -> None:
    """A result is in place when wait() returns, not before or elsewhere."""
    tensors = [torch.full((LARGE // 4,), float(rank + k)) for k in range(4)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for k, (work, tensor) in reversed(list(enumerate(zip(works, tensors, strict=True)))):
        work.wait()
        assert tensor.eq(6 + 4 * k).all()
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert [tensor._version for tensor in tensors] == versions


def test_results_are_in_place_after_wait_in_any_order(pool4: RankPool) -> None:
    pool4(snapshot)
