"""DistributedDataParallel, unpatched, on the backend: the same gradients as one process.

Each rank knows the whole batch and works out the single-process answer itself.
"""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, RankPool, Ranks, gloo_cannot
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import assert_close

BATCH = 8
Gradients = dict[str, Tensor]


class Mlp(nn.Module):
    """Two layers whose sizes are multiples of nothing, the last in `last` precision."""

    def __init__(self, seed: int = 1, last: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.last = nn.Linear(13, 5, dtype=last)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden.to(self.last.weight.dtype))


def whole_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return (
        torch.randn(BATCH, 7, generator=generator),
        torch.randn(BATCH, 5, generator=generator),
    )


def share(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    world_size = dist.get_world_size()
    x, y = whole_batch(step)
    return x[rank::world_size], y[rank::world_size]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return nn.functional.mse_loss(out, batch[1].to(out.dtype))


def gradients(model: nn.Module) -> Gradients:
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def reference_gradients(step: int = 0, **options: Any) -> Gradients:
    model = Mlp(**options)
    loss_of(model, whole_batch(step)).backward()
    return gradients(model)


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same_on_all_ranks(tensors: list[Tensor]) -> None:
    """Compares bit by bit, through object gathers, which no gradient takes."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors)
    for other in everyone:
        assert_close(other, tensors, rtol=0, atol=0)


def train(model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return parameters(model)


# ---- gradients


def check_gradients(rank: int, options: dict[str, Any]) -> None:
    ddp = DDP(Mlp(), **options)
    for step in range(3):  # buckets are rebuilt after the first backward
        ddp.zero_grad()
        loss_of(ddp, share(rank, step)).backward()
        assert_close(gradients(ddp), reference_gradients(step))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 1e-4},
        {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True, "static_graph": True},
        {"broadcast_buffers": False, "init_sync": False},
    ],
    ids=str,
)
def test_gradients_equal_the_full_batch(pool2: RankPool, options: dict[str, Any]) -> None:
    pool2(check_gradients, options)


def check_mixed_dtypes(rank: int) -> None:
    ddp = DDP(Mlp(last=torch.float64))
    loss_of(ddp, share(rank)).backward()
    got, wanted = gradients(ddp), reference_gradients(last=torch.float64)
    assert {g.dtype for g in got.values()} == {torch.float32, torch.float64}
    assert_close(got, wanted)


def test_parameters_of_two_dtypes_are_reduced_in_their_own(pool2: RankPool) -> None:
    pool2(check_mixed_dtypes)


def check_bfloat16(rank: int) -> None:
    ddp = DDP(Mlp().bfloat16())
    x, y = share(rank)
    loss_of(ddp, (x.bfloat16(), y)).backward()
    wanted = {name: grad.bfloat16() for name, grad in reference_gradients().items()}
    assert_close(gradients(ddp), wanted, rtol=5e-2, atol=5e-3)
    assert_same_on_all_ranks(list(gradients(ddp).values()))


def test_bfloat16_model_trains_in_bfloat16(pool2: RankPool) -> None:
    pool2(check_bfloat16)


def check_training(rank: int) -> None:
    ddp, alone = DDP(Mlp()), Mlp()
    got = train(
        ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01), [share(rank, s) for s in range(6)]
    )
    wanted = train(
        alone, torch.optim.AdamW(alone.parameters(), lr=0.01), [whole_batch(s) for s in range(6)]
    )
    assert not torch.equal(wanted[0], Mlp().first.weight)
    assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert_same_on_all_ranks(got)


def test_trained_parameters_equal_one_process(pool4: RankPool) -> None:
    pool4(check_training)


def check_groups(rank: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DDP(Mlp(), process_group=halves[rank % 2])
    x, y = whole_batch()
    mine = slice(rank % 2, None, 2)  # each half has its own data, split again inside it
    position = rank // 2
    loss_of(ddp, (x[mine][position::2], y[mine][position::2])).backward()
    alone = Mlp()
    loss_of(alone, (x[mine], y[mine])).backward()
    assert_close(gradients(ddp), gradients(alone))


def test_groups_of_ranks_average_apart(pool4: RankPool) -> None:
    pool4(check_groups)


def check_mesh(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "other"))
    ddp = DDP(Mlp(), device_mesh=mesh["replicate"])
    x, y = whole_batch()
    position = mesh.get_local_rank("replicate")
    loss_of(ddp, (x[position::2], y[position::2])).backward()
    assert_close(gradients(ddp), reference_gradients())


def test_one_dim_of_a_device_mesh_serves_as_the_group(pool4: RankPool) -> None:
    pool4(check_mesh)


def check_compiled(rank: int) -> None:
    torch._dynamo.reset()
    ddp = DDP(Mlp())
    compiled = torch.compile(ddp, backend="aot_eager")
    loss_of(compiled, share(rank)).backward()
    assert_close(gradients(ddp), reference_gradients())


def test_compiled_module_has_the_same_gradients(pool2: RankPool) -> None:
    pool2(check_compiled)


def check_logging(rank: int) -> None:
    data = DDP(Mlp())._get_ddp_logging_data()
    assert (data["world_size"], data["rank"]) == (2, rank)
    assert data["backend_name"] == BACKEND


def test_ddp_logs_the_name_of_the_backend(pool2: RankPool) -> None:
    pool2(check_logging)


# ---- what the constructor and forward send


def check_initial_broadcast(rank: int) -> None:
    ddp = DDP(Mlp(seed=rank))
    assert_close(parameters(ddp), parameters(Mlp(seed=0)), rtol=0, atol=0)


def test_first_ranks_parameters_win(pool2: RankPool) -> None:
    pool2(check_initial_broadcast)


def construct_with_own_width(rank: int) -> None:
    DDP(nn.Linear(3, 4 + rank))


def test_models_of_different_shapes_are_refused() -> None:
    with Ranks(construct_with_own_width, 2) as ranks:
        (second,) = ranks.results(timedelta(seconds=30), of=[1])
    assert second.error.startswith("RuntimeError")
    assert "appears not to match" in second.error


class Counter(nn.Module):
    """A model with a buffer that takes part in its output."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.register_buffer("count", torch.full((3,), start))
        self.register_buffer("flags", torch.tensor([start > 0, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.count.sum()


def check_buffers(rank: int, broadcast_buffers: bool) -> tuple[list[float], list[bool]]:
    ddp = DDP(Counter(float(rank)), broadcast_buffers=broadcast_buffers)
    ddp.module.count.fill_(10.0 + rank)
    ddp.module.flags.fill_(rank == 0)
    ddp(share(rank)[0])
    return ddp.module.count.tolist(), ddp.module.flags.tolist()


def test_forward_broadcasts_buffers_from_the_first_rank(pool2: RankPool) -> None:
    first = ([10.0] * 3, [True, True])
    assert pool2(check_buffers, True) == [first, first]


def test_buffers_may_be_left_to_each_rank(pool2: RankPool) -> None:
    own = [([10.0] * 3, [True, True]), ([11.0] * 3, [False, False])]
    assert pool2(check_buffers, False) == own


# ---- accumulation and unused parameters


def check_no_sync(rank: int) -> None:
    ddp, alone = DDP(Mlp()), Mlp()
    with ddp.no_sync():
        loss_of(ddp, share(rank, 0)).backward()
    loss_of(alone, share(rank, 0)).backward()
    assert_close(gradients(ddp), gradients(alone))  # this rank's own, not the average
    loss_of(ddp, share(rank, 1)).backward()
    first, second = reference_gradients(0), reference_gradients(1)
    assert_close(gradients(ddp), {name: first[name] + second[name] for name in first})


def test_no_sync_accumulates_until_the_next_backward(pool2: RankPool) -> None:
    pool2(check_no_sync)


class Branches(nn.Module):
    """One branch for even ranks, one for odd, one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(7, 5) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


def check_unused(rank: int) -> None:
    ddp = DDP(Branches(), find_unused_parameters=True)
    for step in range(2):
        ddp.zero_grad()
        x, y = share(rank, step)
        nn.functional.mse_loss(ddp(x, rank), y).backward()
        for branch in range(2):
            alone = Branches()
            bx, by = share(branch, step)
            (nn.functional.mse_loss(alone(bx, branch), by) / 2).backward()
            wanted = alone.branches[branch].weight.grad
            assert_close(ddp.module.branches[branch].weight.grad, wanted)
        assert ddp.module.branches[2].weight.grad is None


def test_parameters_used_on_one_rank_only_are_averaged(pool2: RankPool) -> None:
    pool2(check_unused)


# ---- communication hooks


def hook_allreduce_then_divide(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


def hook_all_gather(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    parts = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]

    def mean(done: Any) -> Tensor:
        done.value()
        return torch.stack(parts).mean(0)

    return dist.all_gather(parts, buffer, async_op=True).get_future().then(mean)


def hook_reduce_scatter_all_gather(
    state: Any, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Runs its second collective in the callback of the first."""
    buffer, world_size = bucket.buffer(), dist.get_world_size()
    padded = nn.functional.pad(buffer, (0, -buffer.numel() % world_size))
    mine = padded.new_empty(padded.numel() // world_size)

    def gather(done: Any) -> Tensor:
        done.value()
        dist.all_gather_single(padded, mine / world_size)
        return padded[: buffer.numel()]

    future = dist.reduce_scatter_single(mine, padded.clone(), async_op=True).get_future()
    return future.then(gather)


def hook_bfloat16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The stock hook under another name: DDP takes it by its own on CUDA and XPU alone."""
    return default_hooks.bf16_compress_hook(state, bucket)


def hook_power_sgd_in_bfloat16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)(state, bucket)


def hook_future_of_our_own(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / dist.get_world_size())
    return future


Hook = Callable[[Any, dist.GradBucket], Any]
EXACT, HALF, BRAIN = {}, {"rtol": 2e-3, "atol": 2e-4}, {"rtol": 2e-2, "atol": 2e-3}


def check_hook(rank: int, hook: Hook, tolerance: dict[str, float]) -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=1e-4)
    ddp.register_comm_hook(None, hook)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, share(rank, step)).backward()
        assert_close(gradients(ddp), reference_gradients(step), **tolerance)
    assert_same_on_all_ranks(list(gradients(ddp).values()))


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (default_hooks.allreduce_hook, EXACT),
        (default_hooks.fp16_compress_hook, HALF),
        (hook_bfloat16, BRAIN),
        (hook_allreduce_then_divide, EXACT),
        (hook_all_gather, EXACT),
        pytest.param(
            hook_reduce_scatter_all_gather,
            EXACT,
            marks=gloo_cannot("reduce_scatter's Work has no future"),
        ),
        (hook_future_of_our_own, EXACT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_comm_hook_averages(pool2: RankPool, hook: Hook, tolerance: dict[str, float]) -> None:
    pool2(check_hook, hook, tolerance)


def check_builtin_hook(rank: int, name: str, tolerance: dict[str, float]) -> None:
    ddp = DDP(Mlp())
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    for step in range(2):
        ddp.zero_grad()
        loss_of(ddp, share(rank, step)).backward()
        assert_close(gradients(ddp), reference_gradients(step), **tolerance)


# torch 2.13: the C++ hook wants a future of a C++ group's type, which Python cannot make. The
# Python hook of the same name (default_hooks.fp16_compress_hook) works.
needs_a_cpp_future = pytest.mark.xfail(
    BACKEND != "gloo", reason="a C++ hook takes the futures of C++ groups alone", strict=True
)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("ALLREDUCE", EXACT), pytest.param("FP16_COMPRESS", HALF, marks=needs_a_cpp_future)],
)
def test_hook_built_into_the_reducer_averages(
    pool2: RankPool, name: str, tolerance: dict[str, float]
) -> None:
    pool2(check_builtin_hook, name, tolerance)


def check_power_sgd(rank: int) -> None:
    # At full rank the approximation is exact: a wrong P or Q is seen as a wrong gradient.
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=64,
        start_powerSGD_iter=2,
        min_compression_rate=0.01,
        use_error_feedback=True,
    )
    ddp = DDP(Mlp())
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        ddp.zero_grad()
        loss_of(ddp, share(rank, step)).backward()
        assert_close(gradients(ddp), reference_gradients(step), rtol=1e-3, atol=1e-4)
    assert state.iter > 2
    assert state.p_memory_dict and state.q_memory_dict  # it did compress
    assert_same_on_all_ranks(list(gradients(ddp).values()))


# Not batched_powerSGD_hook: torch 2.13's fails its own assertion in _orthogonalize.
def test_power_sgd_at_full_rank_averages(pool2: RankPool) -> None:
    pool2(check_power_sgd)


def check_power_sgd_rank_one(rank: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1, 2, min_compression_rate=1)
    ddp = DDP(Mlp())
    ddp.register_comm_hook(state, hook_power_sgd_in_bfloat16)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(ddp, share(rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_on_all_ranks(parameters(ddp))


def test_rank_one_power_sgd_in_bfloat16_keeps_ranks_equal(pool2: RankPool) -> None:
    pool2(check_power_sgd_rank_one)


def check_noop_hook(rank: int) -> None:
    ddp, alone = DDP(Mlp()), Mlp()
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    loss_of(ddp, share(rank)).backward()
    loss_of(alone, share(rank)).backward()
    assert_close(gradients(ddp), gradients(alone))


def test_noop_hook_leaves_each_rank_its_own_gradients(pool2: RankPool) -> None:
    pool2(check_noop_hook)


def check_local_sgd(rank: int) -> None:
    subgroup = [dist.new_group([r]) for r in range(2)][rank]
    ddp, alone = DDP(Mlp()), Mlp()
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), averager)
    train(ddp, optimizer, [share(rank, step) for step in range(2)])
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [whole_batch(s) for s in range(2)])
    assert_close(parameters(ddp), parameters(alone))
    train(ddp, optimizer, [share(rank, step) for step in range(2, 5)])
    assert_same_on_all_ranks(parameters(ddp))  # step 4 averages, after local steps
    loss_of(ddp, share(rank, 6)).backward()
    optimizer.step()  # a local step: ranks part
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, parameters(ddp)[0])
    assert not torch.equal(everyone[0], everyone[1])


def test_local_sgd_averages_models_periodically(pool2: RankPool) -> None:
    pool2(check_local_sgd)


# ---- uneven inputs


def uneven_reference(counts: list[int], divide_by_initial: bool) -> list[Tensor]:
    """What join() promises: absent ranks count as zero gradients, or are not counted."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if step < count]
        optimizer.zero_grad()
        for rank in present:
            divisor = len(counts) if divide_by_initial else len(present)
            (loss_of(model, share(rank, step)) / divisor).backward()
        optimizer.step()
    return parameters(model)


def check_join(rank: int, counts: list[int], divide_by_initial: bool) -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=divide_by_initial):
        train(ddp, optimizer, [share(rank, step) for step in range(counts[rank])])
    assert_close(parameters(ddp), uneven_reference(counts, divide_by_initial))
    assert_same_on_all_ranks(parameters(ddp))
    ddp.zero_grad()
    loss_of(ddp, share(rank)).backward()  # the group is in step afterwards


@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("counts", [[2, 5], [4, 1], [3, 3]], ids=str)
def test_join_accepts_uneven_inputs(
    pool2: RankPool, counts: list[int], divide_by_initial: bool
) -> None:
    pool2(check_join, counts, divide_by_initial)


def check_join_of_four(rank: int) -> None:
    check_join(rank, [1, 3, 2, 0], True)


def test_join_accepts_ranks_that_end_one_after_another(pool4: RankPool) -> None:
    pool4(check_join_of_four)


def check_early_termination(rank: int) -> str:
    ddp = DDP(Mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        with warnings.catch_warnings(), ddp.join(throw_on_early_termination=True):
            train(ddp, optimizer, [share(rank, step) for step in range(2 + rank)])
    except RuntimeError as error:
        return str(error)
    return "ran on"


def test_join_can_end_all_ranks_with_the_first(pool2: RankPool) -> None:
    for said in pool2(check_early_termination):
        assert "exhausted" in said


def check_join_with_zero(rank: int) -> None:
    ddp = DDP(Mlp())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        train(ddp, optimizer, [share(rank, step) for step in range(1 + 2 * rank)])
    # No reference: a rank that has joined goes on to apply its last gradients to its shard.
    for got, after_one_step in zip(parameters(ddp), uneven_reference([1, 1], True), strict=True):
        assert not torch.equal(got, after_one_step)
    assert_same_on_all_ranks(parameters(ddp))


def test_join_takes_ddp_and_its_sharded_optimizer(pool2: RankPool) -> None:
    pool2(check_join_with_zero)


# ---- sharded optimizers


def check_zero(rank: int, options: dict[str, Any]) -> None:
    ddp, alone = DDP(Mlp()), Mlp()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, **options)
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    got = train(ddp, optimizer, [share(rank, step) for step in range(4)])
    wanted = train(alone, reference, [whole_batch(step) for step in range(4)])
    assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        states = optimizer.state_dict()["state"]
        assert len(states) == len(wanted)
        for index, state in reference.state_dict()["state"].items():
            assert_close(states[index]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}], ids=str)
def test_sharded_adam_equals_adam(pool2: RankPool, options: dict[str, Any]) -> None:
    pool2(check_zero, options)


def check_zero_overlap(rank: int) -> None:
    ddp, alone = DDP(Mlp(), bucket_cap_mb=1e-4), Mlp()
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer)
    ddp.register_comm_hook(None, hook)
    for step in range(6):  # each backward is a step of the optimizer
        ddp.zero_grad()
        loss_of(ddp, share(rank, step)).backward()
        if step == 1:  # the first two only learn the buckets
            assert_close(parameters(ddp), parameters(alone), rtol=0, atol=0)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    wanted = train(alone, reference, [whole_batch(step) for step in range(2, 6)])
    assert_close(parameters(ddp), wanted)


@gloo_cannot("hook_with_zero_step refuses it by name")
def test_sharded_step_may_overlap_the_backward(pool2: RankPool) -> None:
    pool2(check_zero_overlap)
