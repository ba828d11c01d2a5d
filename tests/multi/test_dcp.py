"""torch.distributed.checkpoint, unpatched, on the backend: saved here, loaded anywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

Placements = tuple[Placement, ...]
SHAPE = (5, 7)
"""Uneven on every mesh used here."""


def whole(index: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(60 + index)
    return torch.randn(SHAPE, generator=generator)


def sharded(value: Tensor, mesh_shape: tuple[int, ...], placements: Placements) -> DTensor:
    names = ("a", "b")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    return distribute_tensor(value, mesh, placements)


def contents(mesh_shape: tuple[int, ...], placements: Placements, filled: bool) -> dict[str, Any]:
    """What is saved; or the same with nothing in it, to load into."""
    keep = 1.0 if filled else 0.0
    return {
        "sharded": sharded(whole(0) * keep, mesh_shape, placements),
        "half": sharded((whole(1) * keep).bfloat16(), mesh_shape, placements),
        "plain": whole(2) * keep,
        "nested": {"step": 17 if filled else 0, "names": ["a", "b"] if filled else ["", ""]},
    }


def assert_loaded(state: dict[str, Any]) -> None:
    assert_close(state["sharded"].full_tensor(), whole(0), rtol=0, atol=0)
    assert_close(state["half"].full_tensor(), whole(1).bfloat16(), rtol=0, atol=0)
    assert_close(state["plain"], whole(2), rtol=0, atol=0)
    assert state["nested"] == {"step": 17, "names": ["a", "b"]}


def save(rank: int, folder: Path, mesh_shape: tuple[int, ...], placements: Placements) -> None:
    metadata = dcp.save(contents(mesh_shape, placements, True), checkpoint_id=folder)
    assert set(metadata.state_dict_metadata) >= {"sharded", "half", "plain"}


def load(rank: int, folder: Path, mesh_shape: tuple[int, ...], placements: Placements) -> None:
    state = contents(mesh_shape, placements, False)
    dcp.load(state, checkpoint_id=folder)
    assert state["sharded"].placements == placements
    assert_loaded(state)


def files(folder: Path) -> set[str]:
    return {file.name.split("_")[2] for file in folder.glob("__*.distcp")}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((Shard(0),), (Shard(0),)),
        ((Shard(0),), (Shard(1),)),
        ((Shard(1),), (Replicate(),)),
        ((Replicate(),), (Shard(0),)),
    ],
    ids=str,
)
def test_checkpoint_loads_into_another_placement(
    pool2: RankPool, tmp_path: Path, before: Placements, after: Placements
) -> None:
    pool2(save, tmp_path, (2,), before)
    assert files(tmp_path) == {"0", "1"}  # every rank wrote its part
    pool2(load, tmp_path, (2,), after)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Shard(0))),
    ],
    ids=str,
)
def test_two_ranks_checkpoint_loads_on_four(
    pool2: RankPool,
    pool4: RankPool,
    tmp_path: Path,
    mesh: tuple[int, ...],
    placements: Placements,
) -> None:
    pool2(save, tmp_path, (2,), (Shard(0),))
    pool4(load, tmp_path, mesh, placements)


def test_four_ranks_checkpoint_loads_on_two(
    pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    pool4(save, tmp_path, (2, 2), (Shard(1), Shard(0)))
    pool2(load, tmp_path, (2,), (Shard(0),))


# ---- asynchronous saving


def save_meanwhile(rank: int, folder: Path, kind: AsyncCheckpointerType) -> None:
    state = contents((2,), (Shard(0),), True)
    future = dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind)
    # What is saved is what there was: training goes on and overwrites it.
    state["sharded"].to_local().zero_()
    state["plain"].zero_()
    future.result(timeout=60)
    dist.barrier()
    load(rank, folder, (2,), (Shard(1),))


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType), ids=lambda kind: kind.value)
def test_checkpoint_saved_in_the_background_is_of_its_moment(
    pool2: RankPool, tmp_path: Path, kind: AsyncCheckpointerType
) -> None:
    pool2(save_meanwhile, tmp_path, kind)


def save_beside_collectives(rank: int, folder: Path, backend: str | None) -> None:
    # The saver's collectives run on a thread of its own, so they need a group of their own.
    state = contents((2,), (Shard(0),), True)
    group = dist.new_group(backend=backend)
    future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    rounds, done = 0, torch.zeros(1)
    while not done.item():  # both ranks stop in the same round
        done.fill_(float(future.done() and rounds >= 20))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        total = torch.full((3,), float(rounds))
        dist.all_reduce(total)
        assert total.tolist() == [2.0 * rounds] * 3
        rounds += 1
    future.result(timeout=60)
    dist.barrier()
    load(rank, folder, (2,), (Shard(0),))


@pytest.mark.parametrize("backend", [None, "gloo"], ids=["in the same backend", "in gloo"])
def test_training_goes_on_while_a_checkpoint_is_saved(
    pool2: RankPool, tmp_path: Path, backend: str | None
) -> None:
    pool2(save_beside_collectives, tmp_path, backend)


# ---- a training run


class Model(nn.Module):
    """Enough to have uneven shards and optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(7, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def wrap(kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(Model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    return fully_shard(Model(), mesh=mesh)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x[dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
        optimizer.step()


def full_parameters(model: nn.Module) -> list[Tensor]:
    return [
        p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for p in model.parameters()
    ]


class Trainer:
    """A Stateful that saves and restores a model with its optimizer."""

    def __init__(self, kind: str) -> None:
        self.model = wrap(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def train_and_save(rank: int, folder: Path, kind: str) -> list[Tensor]:
    trainer = Trainer(kind)
    train(trainer.model, trainer.optimizer, range(3))
    dcp.save({"trainer": trainer}, checkpoint_id=folder)
    train(trainer.model, trainer.optimizer, range(3, 6))
    return full_parameters(trainer.model)


def resume(rank: int, folder: Path, kind: str) -> list[Tensor]:
    trainer = Trainer(kind)
    dcp.load({"trainer": trainer}, checkpoint_id=folder)
    train(trainer.model, trainer.optimizer, range(3, 6))
    return full_parameters(trainer.model)


@pytest.mark.parametrize("after", ["fsdp", "ddp"])
@pytest.mark.parametrize("before", ["fsdp", "ddp"])
def test_resumed_training_equals_the_uninterrupted(
    pool2: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    wanted = pool2(train_and_save, tmp_path, before)[0]
    for got in pool2(resume, tmp_path, after):
        assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_training_resumes_on_more_ranks(pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    wanted = pool2(train_and_save, tmp_path, "fsdp")[0]
    for got in pool4(resume, tmp_path, "fsdp"):
        assert_close(got, wanted, rtol=1e-4, atol=1e-5)
