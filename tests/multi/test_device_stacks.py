"""What stands on tensors and groups, with its parameters on "tpu": pipelines, DTensor and DCP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankPool, gloo_cannot
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.testing import assert_close

pytestmark = gloo_cannot("it has no tensors on 'tpu'")

WIDTH = 6


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def layers(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def pipeline(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    model, alone = layers("tpu"), layers("cpu")
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, 2, torch.device("tpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x, target = data()
    if rank == 0:
        schedule.step(x.to("tpu"))
    else:
        schedule.step(target=target.to("tpu"))
    nn.functional.mse_loss(alone(x), target).backward()
    wanted = alone[:2] if rank == 0 else alone[2:]
    return [p.grad.cpu() for p in part.parameters()], [p.grad for p in wanted.parameters()]


def test_a_pipeline_has_the_gradients_of_one_process(pool2: RankPool) -> None:
    for ours, theirs in pool2(pipeline):
        assert ours
        assert_close(ours, theirs)


def attention_in_a_ring(rank: int) -> tuple[list[Tensor], list[Tensor], dict[str, int]]:
    generator = torch.Generator().manual_seed(2)
    q, k, v, upstream = (torch.randn(2, 4, 16, 8, generator=generator) for _ in range(4))
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    wanted.backward(upstream)

    mesh = init_device_mesh("tpu", (2,))
    torch.tpu.reset_fallback_counts()
    parts = [t.to("tpu") for t in (q, k, v, upstream)]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
        leaves = [t.detach().clone().requires_grad_() for t in parts[:3]]
        out = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        out.backward(parts[3].clone())
    shards = [out.detach(), *(leaf.grad for leaf in leaves)]
    ours = context_parallel_unshard(mesh, shards, [2] * 4)
    theirs = [wanted.detach(), *(t.grad for t in whole)]
    return [t.cpu() for t in ours], theirs, torch.tpu.fallback_counts()


def test_attention_over_a_sharded_sequence_is_that_of_the_whole(pool2: RankPool) -> None:
    for ours, theirs, fallbacks in pool2(attention_in_a_ring):
        assert_close(ours, theirs)
        assert not fallbacks


def redistribute(rank: int) -> tuple[list[Tensor], str]:
    mesh = init_device_mesh("tpu", (2,))
    whole = torch.arange(35.0).reshape(5, 7)
    rows = distribute_tensor(whole.to("tpu"), mesh, [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    product = columns.t() @ rows  # partial sums, or a gather, as DTensor likes
    back = columns.redistribute(placements=[Replicate()])
    results = [columns.full_tensor(), back.to_local(), product.full_tensor(), (rows + 1).sum()]
    local = [t.full_tensor() if isinstance(t, DTensor) else t for t in results]
    return [t.cpu() for t in local], columns.to_local().device.type


def test_dtensors_move_between_placements(pool2: RankPool) -> None:
    whole = torch.arange(35.0).reshape(5, 7)
    for results, device in pool2(redistribute):
        assert device == "tpu"
        assert_close(results, [whole, whole, whole.t() @ whole, (whole + 1).sum()])


def dropout_over_shards(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("tpu", (2,))
    torch.manual_seed(4)
    x = distribute_tensor(torch.ones(8, 64, device="tpu"), mesh, [Shard(0)])
    return [nn.functional.dropout(x, 0.5).full_tensor().cpu()]


def test_dropout_differs_between_shards_and_agrees_between_ranks(pool2: RankPool) -> None:
    (first,), (second,) = pool2(dropout_over_shards)
    assert torch.equal(first, second)
    assert not torch.equal(first[:4], first[4:])
    assert 150 < (first == 0).sum().item() < 362


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x, target = data()
    loss = nn.functional.mse_loss(model(x.to("tpu")), target.to("tpu"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers("tpu")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(seed)
    fully_shard(model, mesh=init_device_mesh("tpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save_and_load(rank: int, folder: str) -> Any:
    model, optimizer = make(1)
    for _ in range(3):
        step(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    wanted = [step(model, optimizer) for _ in range(3)]
    again, fresh = make(2)
    model_state, optimizer_state = get_state_dict(again, fresh)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        again, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    dist.barrier()
    where = {p.to_local().device.type for p in again.parameters()}
    return [step(again, fresh) for _ in range(3)], wanted, where


def test_a_checkpoint_goes_on_where_it_was_saved(pool2: RankPool, tmp_path: Path) -> None:
    for got, wanted, where in pool2(save_and_load, str(tmp_path)):
        assert got == wanted and where == {"tpu"}


def from_meta(rank: int) -> tuple[list[float], Any]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=init_device_mesh("tpu", (2,)))
    model.to_empty(device="tpu")
    for layer in model:
        torch.manual_seed(3)
        layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.tpu.reset_fallback_counts()
    return [step(model, optimizer) for _ in range(4)], torch.tpu.fallback_counts()


def test_a_model_made_on_meta_is_filled_and_trained(pool2: RankPool) -> None:
    (losses, fallbacks), (others, _) = pool2(from_meta)
    assert losses == others and losses[-1] < losses[0] and not fallbacks
