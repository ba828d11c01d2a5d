"""DTensor and tensor parallelism, unpatched, on the backend, against plain tensors."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor import empty as dtensor_empty
from torch.distributed.tensor import full as dtensor_full
from torch.distributed.tensor import ones as dtensor_ones
from torch.distributed.tensor import zeros as dtensor_zeros
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing import assert_close

Placements = tuple[Placement, ...]
SHAPES = [(4, 8), (5, 7), (1, 3), (2, 9, 3)]
"""Even, uneven, with ranks left empty, and of three dims."""


@lru_cache
def mesh_of(*shape: int) -> DeviceMesh:
    names = ("data", "model")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def whole_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    # Small integers: sums are exact in every order, so that results compare bit by bit.
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-9, 10, tuple(shape), generator=generator).to(dtype)


def partial_share(mesh: DeviceMesh, placements: Placements, whole: Tensor) -> Tensor:
    """This rank's summand for the Partial("sum") dims: theirs add up to `whole`."""
    local = whole
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            position, size = mesh.get_local_rank(dim), mesh.size(dim)
            local = local - (size - 1) if position == 0 else torch.ones_like(local)
    return local


def local_chunk(mesh: DeviceMesh, placements: Placements, whole: Tensor) -> Tensor:
    """What this rank holds, by torch.chunk, dim of the mesh after dim of the mesh."""
    local = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = local.chunk(mesh.size(dim), placement.dim)
            position = mesh.get_local_rank(dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[position] if position < len(chunks) else empty
    return local


def make(mesh: DeviceMesh, placements: Placements, whole: Tensor) -> DTensor:
    """A DTensor of `whole`, made from local parts without any communication."""
    local = local_chunk(mesh, placements, partial_share(mesh, placements, whole))
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def check_holds(tensor: DTensor, whole: Tensor, what: str) -> None:
    """Checks the local part where it is defined, and the whole always."""
    placements = tensor.placements
    if not any(placement.is_partial() for placement in placements):
        wanted = local_chunk(tensor.device_mesh, placements, whole)
        assert_close(tensor.to_local(), wanted, rtol=0, atol=0, msg=lambda m: f"{what}: {m}")
    got = tensor.full_tensor()
    assert_close(got, whole, rtol=0, atol=0, msg=lambda m: f"{what}, whole: {m}")


# ---- redistribution


def placements_for(ndim: int, mesh_ndim: int) -> list[Placements]:
    single = [Replicate(), *(Shard(dim) for dim in range(ndim)), Partial()]
    return list(itertools.product(single, repeat=mesh_ndim))


def check_redistributions(
    rank: int, mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: Placements
) -> int:
    mesh, whole = mesh_of(*mesh_shape), whole_tensor(shape)
    done = 0
    for target in placements_for(len(shape), len(mesh_shape)):
        # torch allows Partial as a target only where it is the source already.
        pairs = zip(source, target, strict=True)
        if all(before.is_partial() or not after.is_partial() for before, after in pairs):
            got = make(mesh, source, whole).redistribute(mesh, target)
            assert got.placements == target
            check_holds(got, whole, f"{source} to {target}")
            done += 1
    return done


def num_targets(source: Placements, ndim: int) -> int:
    return math.prod(ndim + 2 if placement.is_partial() else ndim + 1 for placement in source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", ["replicate", "shard 0", "shard 1", "partial"])
def test_two_ranks_redistribute_to_every_placement(
    pool2: RankPool, shape: tuple[int, ...], source: str
) -> None:
    placement = {
        "replicate": Replicate(),
        "shard 0": Shard(0),
        "shard 1": Shard(1),
        "partial": Partial(),
    }[source]
    wanted = num_targets((placement,), len(shape))
    assert pool2(check_redistributions, (2,), shape, (placement,)) == [wanted] * 2


@pytest.mark.parametrize("shape", [(4, 8), (5, 7)], ids=str)
@pytest.mark.parametrize("source", placements_for(2, 2), ids=str)
def test_a_two_by_two_mesh_redistributes_to_every_placement(
    pool4: RankPool, shape: tuple[int, ...], source: Placements
) -> None:
    assert pool4(check_redistributions, (2, 2), shape, source) == [num_targets(source, 2)] * 4


@pytest.mark.parametrize("source", placements_for(2, 1), ids=str)
def test_four_ranks_in_a_row_redistribute_to_every_placement(
    pool4: RankPool, source: Placements
) -> None:
    assert pool4(check_redistributions, (4,), (6, 5), source) == [num_targets(source, 2)] * 4


def check_reductions(rank: int, op: str, dtype: torch.dtype, target: Placements) -> None:
    mesh = mesh_of(dist.get_world_size())
    parts = [whole_tensor((5, 4), dtype) * (part + 1) for part in range(mesh.size())]
    wanted = {
        "sum": sum(parts),
        "avg": torch.stack(parts).to(torch.float64).mean(0).to(dtype),
        "max": torch.stack(parts).amax(0),
        "min": torch.stack(parts).amin(0),
        "product": torch.stack(parts).prod(0).to(dtype),
    }[op]
    local = DTensor.from_local(parts[rank], mesh, (Partial(op),), run_check=False)
    check_holds(local.redistribute(mesh, target), wanted, op)


@pytest.mark.parametrize("target", [(Replicate(),), (Shard(0),), (Shard(1),)], ids=str)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_partial_values_are_reduced_by_their_op(
    pool2: RankPool, op: str, target: Placements
) -> None:
    pool2(check_reductions, op, torch.float32, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.int32])
def test_partial_values_of_other_dtypes_are_summed(pool2: RankPool, dtype: torch.dtype) -> None:
    pool2(check_reductions, "sum", dtype, (Shard(0),))


def check_backward(rank: int, source: Placements, target: Placements) -> None:
    mesh, whole = mesh_of(2), whole_tensor((5, 7))
    weight = whole_tensor((5, 7)) + 3
    leaf = distribute_tensor(whole, mesh, source).requires_grad_()
    out = leaf.redistribute(mesh, target) * distribute_tensor(weight.clone(), mesh, target)
    out.sum().backward()
    assert leaf.grad.placements == source
    assert_close(leaf.grad.full_tensor(), weight, rtol=0, atol=0)


@pytest.mark.parametrize("target", placements_for(2, 1)[:3], ids=str)
@pytest.mark.parametrize("source", placements_for(2, 1)[:3], ids=str)
def test_gradients_are_redistributed_back(
    pool2: RankPool, source: Placements, target: Placements
) -> None:
    pool2(check_backward, source, target)


def check_asynchronous(rank: int) -> None:
    mesh, whole = mesh_of(2), whole_tensor((6, 4))
    futures = [
        make(mesh, (source,), whole).redistribute(mesh, (Replicate(),), async_op=True)
        for source in (Shard(0), Partial(), Shard(1))
    ]
    for tensor in futures:
        assert_close(tensor.to_local() + 0, whole, rtol=0, atol=0)


def test_redistributions_may_be_under_way_together(pool2: RankPool) -> None:
    pool2(check_asynchronous)


# ---- making and taking apart


def check_distribute(rank: int, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    mesh, whole = mesh_of(*mesh_shape), whole_tensor(shape)
    # Ranks but the first give other data: the first one's is what counts.
    mine = whole if rank == 0 else torch.full_like(whole, float(rank))
    for placements in placements_for(len(shape), len(mesh_shape)):
        if not any(placement.is_partial() for placement in placements):
            got = distribute_tensor(mine, mesh, placements)
            check_holds(got, whole, str(placements))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_distributed_tensor_is_the_first_ranks(pool2: RankPool, shape: tuple[int, ...]) -> None:
    pool2(check_distribute, shape, (2,))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_tensor_distributed_over_two_dims_is_the_first_ranks(
    pool4: RankPool, shape: tuple[int, ...]
) -> None:
    pool4(check_distribute, shape, (2, 2))


def check_from_local(rank: int) -> None:
    mesh = mesh_of(2)
    mine = torch.full((3, 2), float(rank))
    replicated = DTensor.from_local(mine.clone(), mesh, (Replicate(),), run_check=True)
    assert_close(replicated.to_local(), torch.zeros(3, 2), rtol=0, atol=0)
    sharded = DTensor.from_local(mine, mesh, (Shard(0),))
    assert_close(sharded.full_tensor(), torch.tensor([[0.0] * 2] * 3 + [[1.0] * 2] * 3))


def test_checked_replicas_are_the_first_ranks(pool2: RankPool) -> None:
    pool2(check_from_local)


def check_factories(rank: int) -> None:
    mesh = mesh_of(2)
    for made, value in [
        (dtensor_zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]), 0.0),
        (dtensor_ones(5, 3, device_mesh=mesh, placements=[Shard(1)]), 1.0),
        (dtensor_full((5, 3), 2.5, device_mesh=mesh, placements=[Replicate()]), 2.5),
    ]:
        assert_close(made.full_tensor(), torch.full((5, 3), value), rtol=0, atol=0)
    assert dtensor_empty(5, 3, device_mesh=mesh, placements=[Shard(0)]).shape == (5, 3)


def test_factories_fill_every_shard(pool2: RankPool) -> None:
    pool2(check_factories)


# ---- operators


def op_matmul_to_partial(a: Any, b: Any) -> Any:
    return a.t() @ b


def op_softmax_over_shards(a: Any, b: Any) -> Any:
    return torch.softmax(a, 0) + torch.softmax(b, 1)


def op_normalise(a: Any, b: Any) -> Any:
    return (a - a.mean(0, keepdim=True)) / (b.var(0, keepdim=True) + 1)


def op_mixed_layouts(a: Any, b: Any) -> Any:
    return a.sum(1).unsqueeze(1) * b.amax(0)


def op_cat_and_norms(a: Any, b: Any) -> Any:
    return torch.cat([a, b], 1).sum() + a.norm() + torch.linalg.vector_norm(b, 3)


def op_index(a: Any, b: Any) -> Any:
    return torch.nn.functional.embedding((a.abs() % 5).long(), b) if a.ndim == 2 else b


def check_operator(rank: int, operator: Callable[[Any, Any], Any], mesh_shape: Any) -> None:
    mesh = mesh_of(*mesh_shape)
    a, b = whole_tensor((5, 7)), whole_tensor((5, 7)) * 2 + 1
    wanted = operator(a, b)
    choices = placements_for(2, len(mesh_shape))
    for left, right in itertools.product(choices, choices):
        if any(placement.is_partial() for placement in (*left, *right)):
            continue
        got = operator(distribute_tensor(a, mesh, left), distribute_tensor(b, mesh, right))
        got = got.full_tensor() if isinstance(got, DTensor) else got
        assert_close(got, wanted, msg=lambda m, at=(left, right): f"{at}: {m}")


OPERATORS = [
    op_matmul_to_partial,
    op_softmax_over_shards,
    op_normalise,
    op_mixed_layouts,
    op_cat_and_norms,
    op_index,
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda op: op.__name__)
def test_operators_give_what_plain_tensors_give(
    pool2: RankPool, operator: Callable[[Any, Any], Any]
) -> None:
    pool2(check_operator, operator, (2,))


@pytest.mark.parametrize("operator", OPERATORS[:2], ids=lambda op: op.__name__)
def test_operators_on_a_two_by_two_mesh_give_what_plain_tensors_give(
    pool4: RankPool, operator: Callable[[Any, Any], Any]
) -> None:
    pool4(check_operator, operator, (2, 2))


# ---- tensor parallelism


class Mlp(nn.Module):
    """What a transformer's feed-forward part looks like."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def activations(seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 6, 8, generator=generator)


def check_plan(rank: int, plan: dict[str, Any], mesh_shape: tuple[int, ...]) -> dict[str, int]:
    mesh = mesh_of(*mesh_shape)
    model, alone = Mlp(), Mlp()
    parallelize_module(model, mesh["model"], plan)
    x = activations()
    with CommDebugMode() as communication:
        got = model(x)
    got.square().mean().backward()
    wanted = alone(x)
    wanted.square().mean().backward()
    assert_close(got.full_tensor() if isinstance(got, DTensor) else got, wanted)
    assert_close(gradients(model), gradients(alone))
    return {str(op): count for op, count in communication.get_comm_counts().items()}


COLUMNS_THEN_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def test_columns_then_rows_need_one_all_reduce(pool2: RankPool) -> None:
    for counts in pool2(check_plan, COLUMNS_THEN_ROWS, (2,)):
        assert list(counts.values()) == [1] and "all_reduce" in next(iter(counts))


def test_columns_then_rows_work_on_one_dim_of_a_mesh(pool4: RankPool) -> None:
    pool4(check_plan, COLUMNS_THEN_ROWS, (2, 2))


def test_four_ranks_share_the_columns(pool4: RankPool) -> None:
    pool4(check_plan, COLUMNS_THEN_ROWS, (4,))


def test_gathered_columns_feed_a_whole_layer(pool2: RankPool) -> None:
    pool2(check_plan, {"up": ColwiseParallel(output_layouts=Replicate())}, (2,))


def check_sequence_parallel(rank: int) -> None:
    mesh = mesh_of(2)
    model, alone = Mlp(), Mlp()
    plan = {
        "": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
        ),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    x = activations()
    with CommDebugMode() as communication:
        got = model(x)
    counts = {str(op): n for op, n in communication.get_comm_counts().items()}
    assert any("all_gather" in op for op in counts)
    assert any("reduce_scatter" in op for op in counts)
    assert got.placements == (Shard(1),)
    got.square().mean().backward()
    alone_out = alone(x)
    alone_out.square().mean().backward()
    assert_close(got.full_tensor(), alone_out)
    assert_close(gradients(model), gradients(alone))


def test_sequence_parallel_gathers_and_scatters_the_sequence(pool2: RankPool) -> None:
    pool2(check_sequence_parallel)


def check_embedding(rank: int, style: Any) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    alone = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    alone.load_state_dict(model.state_dict())
    parallelize_module(model, mesh_of(2), {"0": style})
    tokens = torch.randint(0, 10, (3, 5), generator=torch.Generator().manual_seed(1))
    model(tokens).square().mean().backward()
    alone(tokens).square().mean().backward()
    assert_close(gradients(model), gradients(alone))


@pytest.mark.parametrize(
    "style",
    [
        RowwiseParallel(input_layouts=Replicate()),
        ColwiseParallel(output_layouts=Replicate()),
    ],
    ids=["by rows", "by columns"],
)
def test_embedding_tables_may_be_sharded(pool2: RankPool, style: Any) -> None:
    pool2(check_embedding, style)


def check_loss_parallel(rank: int) -> None:
    mesh = mesh_of(2)
    torch.manual_seed(3)
    head, alone = nn.Linear(8, 11, bias=False), nn.Linear(8, 11, bias=False)
    alone.load_state_dict(head.state_dict())
    parallelize_module(
        head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    )
    x = activations().reshape(-1, 8)
    labels = torch.randint(0, 11, (x.size(0),), generator=torch.Generator().manual_seed(2))
    with loss_parallel():
        logits = head(x)
        assert logits.placements == (Shard(1),)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
    wanted = nn.functional.cross_entropy(alone(x), labels)
    wanted.backward()
    assert_close(loss.full_tensor() if isinstance(loss, DTensor) else loss, wanted)
    assert_close(gradients(head), gradients(alone))


def test_cross_entropy_of_sharded_logits_equals_the_whole(pool2: RankPool) -> None:
    pool2(check_loss_parallel)


def check_prepare_output(rank: int) -> None:
    mesh = mesh_of(2)
    layer = nn.Linear(8, 8)
    torch.manual_seed(6)
    nn.init.normal_(layer.weight)
    plan = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(0))
    parallelize_module(layer, mesh, plan)
    x = torch.ones(4, 8)
    mine = layer(x)  # both ranks' outputs are summands, each keeps its rows of the sum
    wanted = nn.functional.linear(x, layer.weight, layer.bias) * 2
    assert_close(mine, wanted.chunk(2)[rank])


def test_module_outputs_are_reduced_and_scattered_on_request(pool2: RankPool) -> None:
    pool2(check_prepare_output)


def shard_first_dim(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(
            key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, (Shard(0),)))
        )


def check_distribute_module(rank: int) -> None:
    mesh = mesh_of(2)
    model = distribute_module(Mlp(), mesh, shard_first_dim)
    alone = Mlp()
    x = activations()
    got = model(distribute_tensor(x, mesh, (Replicate(),)))
    got.square().mean().backward()
    wanted = alone(x)
    wanted.square().mean().backward()
    assert_close(got.full_tensor(), wanted)
    assert_close(gradients(model), gradients(alone))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, alone)]
    for optimizer in optimizers:
        optimizer.step()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(mine.detach().full_tensor(), whole.detach(), rtol=1e-4, atol=1e-5)


def test_module_with_sharded_parameters_trains_alike(pool2: RankPool) -> None:
    pool2(check_distribute_module)


# ---- the mesh


def check_mesh(rank: int) -> None:
    mesh = mesh_of(2, 2)
    assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2]
    assert dist.get_process_group_ranks(mesh.get_group("data")) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(mesh.get_group("model")) == [
        rank // 2 * 2,
        rank // 2 * 2 + 1,
    ]
    flat = mesh._flatten("all")
    value = torch.tensor([float(rank)])
    for group, wanted in [
        (mesh.get_group("data"), rank % 2 * 2 + 2.0),
        (mesh.get_group("model"), rank // 2 * 4 + 1.0),
        (flat.get_group(), 6.0),
    ]:
        total = value.clone()
        dist.all_reduce(total, group=group)
        assert total.item() == wanted


def test_mesh_dims_are_groups_of_their_own(pool4: RankPool) -> None:
    pool4(check_mesh)
