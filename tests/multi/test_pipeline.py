"""torch.distributed.pipelining, unpatched, on the backend: stages on ranks equal one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

BATCH, WIDTH, LAYERS = 8, 6, 4
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "ZBV zero bubble": ScheduleZBVZeroBubble,
}
CPU = torch.device("cpu")


class Layer(nn.Module):
    """One layer; the first widens, so that activations differ in shape from the input."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(20 + index)
        self.linear = nn.Linear(WIDTH if index == 0 else WIDTH + 3, WIDTH + 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer(index) for index in range(LAYERS)))


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(30 + step)
    return (
        torch.randn(BATCH, WIDTH, generator=generator),
        torch.randn(BATCH, WIDTH + 3, generator=generator),
    )


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target)


def make_schedule(name: str, stages: list[PipelineStage], microbatches: int) -> Any:
    kind = SCHEDULES[name]
    single = kind in (ScheduleGPipe, Schedule1F1B)
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss_of)


def stage_indices(name: str, rank: int, size: int) -> list[int]:
    """Stages of `rank`: one; or two, dealt round or, for the V shape, there and back."""
    if name in ("GPipe", "1F1B"):
        return [rank]
    return [rank, 2 * size - 1 - rank] if name == "ZBV zero bubble" else [rank, rank + size]


def check_schedule(rank: int, name: str, microbatches: int) -> None:
    size = dist.get_world_size()
    indices = stage_indices(name, rank, size)
    num_stages = size * len(indices)
    per_stage = LAYERS // num_stages
    model, alone = layers(), layers()
    modules = [model[i * per_stage : (i + 1) * per_stage] for i in indices]
    stages = [
        PipelineStage(module, index, num_stages, CPU)
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = make_schedule(name, stages, microbatches)
    mine = [p for module in modules for p in module.parameters()]
    wanted_mine = [
        p for i in indices for p in alone[i * per_stage : (i + 1) * per_stage].parameters()
    ]
    optimizer = torch.optim.SGD(mine, lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        x, target = whole_batch(step)
        losses: list[Tensor] = []
        first, last = 0 in indices, num_stages - 1 in indices
        out = schedule.step(
            *([x] if first else []),
            **({"target": target, "losses": losses} if last else {}),
        )
        reference.zero_grad()
        wanted = alone(x)
        wanted_loss = loss_of(wanted, target)
        wanted_loss.backward()
        if last:
            assert_close(out, wanted)
            assert len(losses) == microbatches
            assert_close(torch.stack(losses).mean(), wanted_loss)
        assert_close([p.grad for p in mine], [p.grad for p in wanted_mine])
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    assert_close(mine, wanted_mine)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_one_stage_a_rank_trains_like_one_process(
    pool2: RankPool, name: str, microbatches: int
) -> None:
    pool2(check_schedule, name, microbatches)


@pytest.mark.parametrize("name", ["interleaved 1F1B", "interleaved zero bubble", "ZBV zero bubble"])
def test_two_stages_a_rank_train_like_one_process(pool2: RankPool, name: str) -> None:
    pool2(check_schedule, name, 4)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_four_stages_train_like_one_process(pool4: RankPool, name: str) -> None:
    pool4(check_schedule, name, 4)


def check_evaluation(rank: int) -> None:
    model, alone = layers(), layers()
    stage = PipelineStage(model[rank * 2 : rank * 2 + 2], rank, 2, CPU)
    schedule = ScheduleGPipe(stage, 4)
    x, _ = whole_batch(0)
    out = schedule.eval(*([x] if rank == 0 else []))
    if rank == 1:
        with torch.no_grad():
            assert_close(out, alone(x))


def test_evaluation_runs_forward_only(pool2: RankPool) -> None:
    pool2(check_evaluation)


def check_traced(rank: int) -> None:
    model, alone = layers(), layers()
    x, target = whole_batch(0)
    pipe = pipeline(model, (x[:2],), split_spec={"2": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    schedule = Schedule1F1B(pipe.build_stage(rank, CPU), 4, loss_fn=loss_of)
    out = schedule.step(x) if rank == 0 else schedule.step(target=target)
    wanted = alone(x)
    loss_of(wanted, target).backward()
    got = {n: p.grad for n, p in pipe.get_stage_module(rank).named_parameters()}
    gradients = {n: p.grad for n, p in alone[rank * 2 : rank * 2 + 2].named_parameters()}
    assert len(got) == len(gradients) == 4
    assert_close(list(got.values()), list(gradients.values()))
    if rank == 1:
        assert_close(out, wanted)


def test_model_split_by_tracing_has_the_same_gradients(pool2: RankPool) -> None:
    pool2(check_traced)


def check_with_data_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    index, part = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    model, alone = layers(), layers()
    module = fully_shard(model[index * 2 : index * 2 + 2], mesh=mesh["data"])
    stage = PipelineStage(module, index, 2, CPU, group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_of)
    x, target = whole_batch(0)
    rows = slice(part, None, 2)
    schedule.step(*([x[rows]] if index == 0 else []), **({"target": target[rows]} if index else {}))
    loss_of(alone(x), target).backward()
    for got, wanted in zip(
        module.parameters(), alone[index * 2 : index * 2 + 2].parameters(), strict=True
    ):
        assert isinstance(got.grad, DTensor)
        assert_close(got.grad.full_tensor(), wanted.grad)


def test_stages_may_be_sharded_over_data_parallel_ranks(pool4: RankPool) -> None:
    pool4(check_with_data_parallel)
