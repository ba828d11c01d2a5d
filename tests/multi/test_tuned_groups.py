"""Ranks that stand for a slice run the tuned forms: every verb gives what it gives without them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch import Tensor

import tpu_dist

pytestmark = gloo_cannot("it has no programs")

SLICES = ["v5p:2x2x1", "tpu7x:1x2x1", "v5e:1x2*2", "v6e:1x1*4"]
"""Of four devices each: a block, chips of two devices, and slices joined over DCN."""

GROUPS = [(0, 1, 2, 3), (2, 0, 3, 1), (0, 1), (3, 1), (0, 3), (0, 1, 3), (2,)]
"""Whole slices in two orders, both axes of a 2x2 mesh, a diagonal, and what is no block."""

SIZE = 2500  # elements: above what travels in envelopes, and no multiple of a tile

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8,
    torch.int32, torch.int64, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.fixture(scope="module", params=SLICES)
def pretending(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(4, env={"TPU_DIST_TOPOLOGY": request.param}) as pool:
        yield pool


@pytest.fixture(scope="module")
def block() -> Iterator[RankPool]:
    with RankPool(4, env={"TPU_DIST_TOPOLOGY": SLICES[0]}) as pool:
        yield pool


def values(source: int, target: int, dtype: torch.dtype, size: int = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(10 * source + target)
    return torch.randint(0, 3, (size,), generator=generator).to(dtype)


def total(rows: list[Tensor]) -> Tensor:
    if rows[0].dtype is torch.bool:
        return torch.stack(rows).any(0)
    wide = [row.to(torch.float32) if row.dtype.itemsize == 1 else row for row in rows]
    return torch.stack(wide).sum(0).to(rows[0].dtype)


def check_group(
    group: dist.ProcessGroup, members: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    me, size = dist.get_rank(group), len(members)
    ranks = range(size)

    def given(target: int, length: int = SIZE) -> Tensor:
        return values(me, target, dtype, length).to(device)

    def room(length: int = SIZE) -> Tensor:
        return torch.empty(length, dtype=dtype, device=device)

    def same(found: Tensor, wanted: Tensor, verb: str) -> None:
        where = f"{verb} of {dtype} on {device} in {members} on {dist.get_rank()}"
        assert found.dtype == wanted.dtype
        found = found.cpu()
        raw = found.view(torch.uint8).equal(wanted.view(torch.uint8))
        assert raw, f"{where}: {found[:8]} is not {wanted[:8]}"

    reduced = total([values(source, 9, dtype) for source in ranks])
    tensor = given(9)
    dist.all_reduce(tensor, group=group)
    same(tensor, reduced, "all_reduce")

    for root in ranks:
        tensor = given(9)
        dist.reduce(tensor, group_dst=root, group=group)
        if me == root:
            same(tensor, reduced, "reduce")
        tensor = given(8)
        dist.broadcast(tensor, group_src=root, group=group)
        same(tensor, values(root, 8, dtype), "broadcast")
        outputs = [room() for _ in ranks] if me == root else None
        dist.gather(given(7), outputs, group_dst=root, group=group)
        for source, output in enumerate(outputs or ()):
            same(output, values(source, 7, dtype), "gather")
        tensor = room()
        inputs = [given(target) for target in ranks] if me == root else None
        dist.scatter(tensor, inputs, group_src=root, group=group)
        same(tensor, values(root, me, dtype), "scatter")

    outputs = [room() for _ in ranks]
    dist.all_gather(outputs, given(6), group=group)
    for source, output in enumerate(outputs):
        same(output, values(source, 6, dtype), "all_gather")

    tensor = room()
    dist.reduce_scatter(tensor, [given(target) for target in ranks], group=group)
    same(tensor, total([values(source, me, dtype) for source in ranks]), "reduce_scatter")

    lengths = [SIZE + 100 * target for target in ranks]
    outputs = [room(lengths[me]) for _ in ranks]
    inputs = [given(target, lengths[target]) for target in ranks]
    dist.all_to_all(outputs, inputs, group=group)
    for source, output in enumerate(outputs):
        same(output, values(source, me, dtype, lengths[me]), "all_to_all")


def every_verb(
    rank: int, members: tuple[int, ...], dtypes: list[torch.dtype], device: str = "cpu"
) -> set[str]:
    """Check all verbs; return the forms that were used."""
    from tpu_dist.runtime.runtime import current_runtime

    runtime = current_runtime()
    assert runtime is not None and runtime.rank_map is not None
    group = dist.new_group(list(members))
    if rank not in members:
        return set()
    assert isinstance(group, dist.ProcessGroup)
    for dtype in dtypes:
        check_group(group, members, dtype, device)
    lane = group._lane  # type: ignore[attr-defined]
    return {key.form for key in lane.programs._cache}


@pytest.mark.parametrize("members", GROUPS, ids=str)
def test_every_verb_is_right_in_every_kind_of_group(
    pretending: RankPool, members: tuple[int, ...]
) -> None:
    for used in pretending(every_verb, members, [torch.float32, torch.int64]):
        if used and len(members) > 1:
            assert used >= {"native_all_reduce", "native_all_gather", "native_reduce_scatter"}
            assert used >= {"masked_sum", "masked_scatter", "native_all_to_all"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_right(block: RankPool, dtype: torch.dtype) -> None:
    block(every_verb, (0, 1, 2, 3), [dtype])


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_tensors_on_the_device_take_the_same_forms(block: RankPool, dtype: torch.dtype) -> None:
    for used in block(every_verb, (2, 0, 3, 1), [dtype], "tpu"):
        assert used >= {"masked_sum", "masked_scatter", "native_all_gather"}


def on_a_part_of_a_slice(rank: int, members: tuple[int, ...]) -> set[str]:
    """As on a slice whose programs must span it, of which these ranks are a part."""
    from tpu_dist.runtime.runtime import current_runtime
    from tpu_dist.topology.rank_map import RankMap
    from tpu_dist.topology.system import System

    runtime = current_runtime()
    assert runtime is not None
    row_major = RankMap.row_major(System.parse("v5e:4x4"))
    runtime.rank_map = row_major  # its first ranks are these
    return every_verb(rank, members, [torch.float32, torch.bfloat16])


def test_a_part_of_a_slice_without_programs_is_right_over_the_hosts_network() -> None:
    with RankPool(4) as pool:
        for members in [(0, 1), (2, 0, 3)]:
            for used in pool(on_a_part_of_a_slice, members):
                assert used == set()


def in_lockstep(rank: int, dtypes: list[torch.dtype]) -> set[str]:
    """Every verb along both axes of a mesh, by programs of all ranks; return their forms."""
    mesh = tpu_dist.init_device_mesh((2, 2), mesh_dim_names=("dp", "tp"), lockstep=True)
    used: set[str] = set()
    for name in ("tp", "dp"):
        group = mesh.get_group(name)
        members = tuple(dist.get_process_group_ranks(group))
        for dtype in dtypes:
            for device in ("cpu", "tpu"):
                check_group(group, members, dtype, device)
        used |= {key.form for key in group._siblings.programs._cache}  # type: ignore[attr-defined]
        world = torch.ones(3000)
        dist.all_reduce(world)
        assert world.eq(4).all()
    return used


@pytest.mark.parametrize("topology", ["v5e:2x2", "tpu7x:1x2x1", "v5e:1x2*2"])
def test_groups_in_lockstep_run_as_one_program_and_are_right(topology: str) -> None:
    with RankPool(4, env={"TPU_DIST_TOPOLOGY": topology}) as pool:
        for used in pool(in_lockstep, [torch.float32, torch.bfloat16]):
            assert used >= {"native_all_reduce", "native_all_gather", "native_reduce_scatter"}


def one_axis_apart(rank: int, lockstep: bool, calls: str) -> str:
    """One tp group does what the other does not; return what this rank was told."""
    mesh = tpu_dist.init_device_mesh((2, 2), mesh_dim_names=("dp", "tp"), lockstep=lockstep)
    group = mesh.get_group("tp")
    if lockstep and calls == "none":
        group.set_timeout(timedelta(seconds=6))
    first = rank in dist.get_process_group_ranks(group) and mesh.get_local_rank("dp") == 0
    tensor = torch.ones(5000)
    try:
        if calls == "other size" and first:
            dist.all_reduce(torch.ones(6000), group=group)
        elif calls == "other verb" and first:
            dist.broadcast(tensor, group_src=0, group=group)
        elif not (calls == "none" and first):
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(2).all()
    except tpu_dist.TpuDistError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


TOPOLOGY = {"TPU_DIST_TOPOLOGY": "v5e:2x2"}


@pytest.mark.parametrize("calls", ["other size", "other verb", "none"])
def test_groups_that_made_no_promise_do_not_wait_for_each_other(calls: str) -> None:
    with RankPool(4, env=TOPOLOGY) as pool:
        assert pool(one_axis_apart, False, calls) == ["done"] * 4


@pytest.mark.parametrize("calls", ["other size", "other verb"])
def test_groups_in_lockstep_that_differ_are_told_so_on_every_rank(calls: str) -> None:
    with RankPool(4, env=TOPOLOGY) as pool:
        for said in pool(one_axis_apart, True, calls):
            assert said.startswith("MismatchError"), said


def test_a_group_in_lockstep_that_does_not_come_is_named_in_time() -> None:
    with RankPool(4, env=TOPOLOGY) as pool:
        results = pool(one_axis_apart, True, "none")
    assert results[0] == results[1] == "done"
    for said in results[2:]:
        assert said.startswith("CollectiveTimeoutError"), said
        assert "rank 0" in said or "ranks 0" in said or "[0, 1]" in said, said
