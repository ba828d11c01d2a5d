"""fully_shard, unpatched, on the backend: the same training as one process on the full batch.

Sizes divide by no number of ranks, so that shards are uneven and padded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close

BATCH, WIDTH, HIDDEN, BLOCKS = 8, 7, 13, 3
Batch = tuple[Tensor, Tensor]
LOOSE = {"rtol": 1e-4, "atol": 1e-5}


class Block(nn.Module):
    """A residual block whose weights have uneven first sizes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(hidden: int = HIDDEN) -> Model:
    torch.manual_seed(1)
    return Model(hidden)


def whole_batch(step: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(BATCH, WIDTH, generator=generator),
        torch.randn(BATCH, 5, generator=generator),
    )


def share(step: int = 0, part: int | None = None, parts: int | None = None) -> Batch:
    """This rank's rows of the batch, or those of one of `parts`."""
    x, y = whole_batch(step)
    rows = slice(dist.get_rank() if part is None else part, None, parts or dist.get_world_size())
    return x[rows], y[rows]


@lru_cache
def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


@lru_cache
def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shard(model: Model, mesh: DeviceMesh | None = None, **options: Any) -> Model:
    mesh = mesh or mesh_1d()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0])
    return nn.functional.mse_loss(out, batch[1].to(out.dtype))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter.detach()) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def reference_gradients(step: int = 0) -> dict[str, Tensor]:
    model = make_model()
    loss_of(model, whole_batch(step)).backward()
    return full_gradients(model)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(
    model: nn.Module, batches: list[Batch], said: Callable[[Tensor], float] = Tensor.item
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(said(loss))
    return losses


def assert_trains_like_one_process(model: nn.Module, steps: int = 4) -> None:
    alone = make_model()
    wanted = train(alone, [whole_batch(step) for step in range(steps)])
    got = train(model, [share(step) for step in range(steps)], mean_over_ranks)
    assert wanted[-1] < wanted[0]
    assert_close(got, wanted, **LOOSE)
    assert_close(full_parameters(model), full_parameters(alone), **LOOSE)


# ---- training


def check_training(rank: int, options: dict[str, Any]) -> None:
    assert_trains_like_one_process(shard(make_model(), **options))


@pytest.mark.parametrize("reshard", [True, False])
def test_sharded_training_equals_one_process(pool2: RankPool, reshard: bool) -> None:
    pool2(check_training, {"reshard_after_forward": reshard})


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_four_shards_train_like_one_process(pool4: RankPool, reshard: bool | int) -> None:
    pool4(check_training, {"reshard_after_forward": reshard})


def check_hybrid(rank: int, options: dict[str, Any]) -> None:
    model = shard(make_model(), mesh_2d(), **options)
    weight = model.blocks[0].up.weight
    assert weight.placements == (Replicate(), Shard(0))
    assert_trains_like_one_process(model)


@pytest.mark.parametrize("reshard", [True, False])
def test_hybrid_sharding_equals_one_process(pool4: RankPool, reshard: bool) -> None:
    pool4(check_hybrid, {"reshard_after_forward": reshard})


def check_tensor_parallel(rank: int) -> None:
    mesh = mesh_2d()
    model, alone = make_model(12), make_model(12)  # torch's TP needs even activations
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["shard"], plan)
    shard(model, mesh["replicate"])
    for step in range(3):
        model.zero_grad()
        loss_of(model, share(step, mesh.get_local_rank("replicate"), 2)).backward()
        alone.zero_grad()
        loss_of(alone, whole_batch(step)).backward()
        assert_close(full_gradients(model), full_gradients(alone), **LOOSE)
    assert model.blocks[0].up.weight.device_mesh.ndim == 2


def test_sharding_over_tensor_parallelism_has_the_same_gradients(pool4: RankPool) -> None:
    pool4(check_tensor_parallel)


def check_activation_checkpoint(rank: int) -> None:
    model = make_model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    shard(model)
    loss_of(model, share()).backward()
    got = {
        n.replace("_checkpoint_wrapped_module.", ""): g for n, g in full_gradients(model).items()
    }
    assert_close(got, reference_gradients(), **LOOSE)


def test_recomputed_blocks_gather_again(pool2: RankPool) -> None:
    pool2(check_activation_checkpoint)


def check_frozen(rank: int) -> None:
    model = make_model()
    model.blocks[0].requires_grad_(False)
    shard(model)
    loss_of(model, share()).backward()
    wanted = {n: g for n, g in reference_gradients().items() if not n.startswith("blocks.0.")}
    assert_close(full_gradients(model), wanted, **LOOSE)


def test_frozen_blocks_get_no_gradient(pool2: RankPool) -> None:
    pool2(check_frozen)


def check_prefetch(rank: int) -> None:
    model = shard(make_model())
    blocks = list(model.blocks)
    for here, after in zip(blocks, blocks[1:], strict=False):
        here.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([here])
    handle = blocks[0].unshard(async_op=True)
    handle.wait()
    assert_close(blocks[0].up.weight.detach(), make_model().blocks[0].up.weight.detach())
    blocks[0].reshard()
    assert_trains_like_one_process(model)


def test_prefetched_and_asynchronous_gathers_are_the_same(pool2: RankPool) -> None:
    pool2(check_prefetch)


# ---- what a shard is


def check_shards(rank: int) -> None:
    model, alone = shard(make_model()), make_model()
    for got, whole in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(got, DTensor) and got.placements == (Shard(0),)
        chunks = whole.detach().chunk(dist.get_world_size())
        mine = chunks[rank] if rank < len(chunks) else whole.detach()[:0]
        assert_close(got.to_local().detach(), mine, rtol=0, atol=0)


def test_each_rank_holds_its_chunk_of_the_rows(pool4: RankPool) -> None:
    pool4(check_shards)


def check_placement(rank: int) -> None:
    torch.manual_seed(1)
    model, alone = nn.Linear(6, 4), nn.Linear(6, 4)
    alone.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh_1d(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert model.weight.placements == (Shard(1),)
    assert model.weight.to_local().shape == (4, 3)
    x = torch.randn(8, 6)
    model(x[rank::2]).square().mean().backward()
    alone(x).square().mean().backward()
    assert_close(full_gradients(model), full_gradients(alone))


def test_columns_may_be_sharded_instead_of_rows(pool2: RankPool) -> None:
    pool2(check_placement)


# ---- precision


def bfloat16_reference(policy: MixedPrecisionPolicy, parts: int) -> dict[str, Tensor]:
    """Each part's gradients from a copy in low precision, averaged in the reduce dtype."""
    sums: dict[str, Tensor] = {}
    for part in range(parts):
        model = make_model().to(policy.param_dtype)
        x, y = share(part=part, parts=parts)
        out = model(x.to(policy.param_dtype)).to(policy.output_dtype or policy.param_dtype)
        nn.functional.mse_loss(out, y.to(out.dtype)).backward()
        for name, gradient in full_gradients(model).items():
            gradient = gradient.to(policy.reduce_dtype or gradient.dtype)
            sums[name] = sums[name] + gradient if name in sums else gradient
    return {name: (total / parts).float() for name, total in sums.items()}


def check_mixed_precision(rank: int, policy: MixedPrecisionPolicy, tolerance: float) -> None:
    model = make_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh_1d(), mp_policy=replace(policy, output_dtype=None))
    fully_shard(model, mesh=mesh_1d(), mp_policy=policy)
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda _, inputs, out: seen.append(out.dtype))
    loss = loss_of(model, share())
    loss.backward()
    assert seen == [policy.param_dtype]
    assert loss.dtype == (policy.output_dtype or policy.param_dtype)
    got = full_gradients(model)
    assert {g.dtype for g in got.values()} == {torch.float32}
    wanted = bfloat16_reference(policy, dist.get_world_size())
    assert_close(got, wanted, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32), 1e-5),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), 1e-5),
        (MixedPrecisionPolicy(torch.bfloat16), 2e-2),
        (MixedPrecisionPolicy(torch.float16, torch.float16), 5e-3),
    ],
    ids=["reduced in float32, float32 out", "reduced in float32", "bfloat16", "float16"],
)
def test_mixed_precision_gathers_and_reduces_in_its_dtypes(
    pool2: RankPool, policy: MixedPrecisionPolicy, tolerance: float
) -> None:
    pool2(check_mixed_precision, policy, tolerance)


# ---- gradients


def check_clipping(rank: int, hybrid: bool) -> None:
    model = shard(make_model(), mesh_2d() if hybrid else mesh_1d())
    alone = make_model()
    loss_of(model, share()).backward()
    loss_of(alone, whole_batch()).backward()
    got = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
    assert wanted > 0.1
    assert_close(full(got), wanted)
    assert_close(full_gradients(model), full_gradients(alone))


def test_clipping_uses_the_norm_over_all_shards(pool2: RankPool) -> None:
    pool2(check_clipping, False)


def test_clipping_uses_the_norm_over_all_shards_of_one_replica(pool4: RankPool) -> None:
    pool4(check_clipping, True)


def check_max_norm(rank: int) -> None:
    model = shard(make_model())
    loss_of(model, share()).backward()
    got = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type=float("inf"))
    wanted = max(g.abs().max() for g in reference_gradients().values())
    assert_close(full(got), wanted)


def test_largest_gradient_is_found_over_all_shards(pool2: RankPool) -> None:
    pool2(check_max_norm)


def check_accumulation(rank: int) -> None:
    model = shard(make_model())
    for step in range(3):
        last = step == 2
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        loss_of(model, share(step)).backward()
        if not last:
            assert model.head.weight.grad is None  # kept whole and unreduced until the last
    parts = [reference_gradients(step) for step in range(3)]
    wanted = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert_close(full_gradients(model), wanted, **LOOSE)


def test_gradients_accumulate_unreduced_until_asked(pool2: RankPool) -> None:
    pool2(check_accumulation)


def check_accumulation_of_replicas(rank: int) -> None:
    model = shard(make_model(), mesh_2d())
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        loss_of(model, share(step)).backward()
    first, second = reference_gradients(0), reference_gradients(1)
    wanted = {name: first[name] + second[name] for name in first}
    assert_close(full_gradients(model), wanted, **LOOSE)


def test_replicas_may_reduce_once_for_many_backwards(pool4: RankPool) -> None:
    pool4(check_accumulation_of_replicas)


def check_divide_factor(rank: int, factor: float, force_sum: bool, hybrid: bool) -> None:
    model = shard(make_model(), mesh_2d() if hybrid else mesh_1d())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(force_sum)
    loss_of(model, share()).backward()
    scale = dist.get_world_size() / factor
    wanted = {name: gradient * scale for name, gradient in reference_gradients().items()}
    assert_close(full_gradients(model), wanted, **LOOSE)


PREMULTIPLIES = gloo_cannot("no PREMUL_SUM")


@pytest.mark.parametrize(
    ("factor", "force_sum"),
    [
        (2.0, False),
        (3.0, True),
        pytest.param(3.0, False, marks=PREMULTIPLIES),
        pytest.param(1.0, False, marks=PREMULTIPLIES),
        pytest.param(0.25, False, marks=PREMULTIPLIES),
    ],
)
def test_gradients_are_divided_by_the_factor_asked_for(
    pool2: RankPool, factor: float, force_sum: bool
) -> None:
    pool2(check_divide_factor, factor, force_sum, False)


@pytest.mark.parametrize(
    ("factor", "force_sum"), [(3.0, True), pytest.param(3.0, False, marks=PREMULTIPLIES)]
)
def test_replicas_gradients_are_divided_by_the_factor_asked_for(
    pool4: RankPool, factor: float, force_sum: bool
) -> None:
    pool4(check_divide_factor, factor, force_sum, True)


def check_all_reduce_hook(rank: int) -> None:
    # HSDP by hand: shard over one dim of the mesh, reduce over the other in a hook.
    mesh = mesh_2d()
    model = shard(make_model(), mesh["shard"])
    replicas = mesh.get_group("replicate")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(
                lambda grads: dist.all_reduce(grads, dist.ReduceOp.AVG, group=replicas)
            )
    loss_of(model, share()).backward()
    assert_close(full_gradients(model), reference_gradients(), **LOOSE)


def test_hook_reduces_over_another_group_after_the_scatter(pool4: RankPool) -> None:
    pool4(check_all_reduce_hook)


# ---- initial values and state dicts


def check_meta_init(rank: int) -> None:
    with torch.device("meta"):
        model = Model()
    shard(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    source = make_model().state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source, options=options)
    assert_close(full_parameters(model), full_parameters(make_model()), rtol=0, atol=0)
    assert_trains_like_one_process(model)


def test_model_without_memory_is_filled_from_the_first_rank(pool2: RankPool) -> None:
    pool2(check_meta_init)


def check_state_dict(rank: int) -> None:
    alone = make_model()
    model = shard(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    loss_of(model, share()).backward()
    loss_of(alone, whole_batch()).backward()
    optimizer.step()
    reference.step()

    sharded = get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in sharded.values())
    got = {name: full(value) for name, value in sharded.items()}
    assert_close(got, dict(alone.state_dict()), **LOOSE)

    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=on_first)
    states = get_optimizer_state_dict(model, optimizer, options=on_first)
    if rank == 0:
        assert_close(dict(whole), dict(alone.state_dict()), **LOOSE)
        wanted = get_optimizer_state_dict(alone, reference)["state"]
        assert_close(states["state"], wanted, **LOOSE)
    else:
        assert not whole and not states

    fresh = shard(make_model())
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.01)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, whole, options=from_first)
    set_optimizer_state_dict(fresh, optimizer, states, options=from_first)
    loss_of(fresh, share(1)).backward()
    optimizer.step()
    reference.zero_grad()
    loss_of(alone, whole_batch(1)).backward()
    reference.step()
    assert_close(full_parameters(fresh), full_parameters(alone), **LOOSE)


def test_whole_state_is_collected_on_one_rank_and_spread_again(pool2: RankPool) -> None:
    pool2(check_state_dict)
