"""A small transformer trained for twenty steps: the backend's losses are gloo's."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

DEVICE = "cpu"
"""Where models and batches are; on_device() chooses another in a rank."""

STEPS, BATCH, LENGTH, TOKENS, WIDTH, HEADS, LAYERS = 20, 8, 16, 61, 32, 4, 2


class Attention(nn.Module):
    """Causal self-attention; the head count follows the width it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer().to(DEVICE)


def batch_of(step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Rows of counting sequences: something that can be learnt."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, TOKENS, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    rows = (start + stride * torch.arange(LENGTH + 1)) % TOKENS
    mine = rows[part::parts].to(DEVICE)
    return mine[:, :-1], mine[:, 1:]


def train(model: nn.Module, part: int, parts: int) -> tuple[list[float], list[float]]:
    """Losses averaged over the ranks, and the gradients' norms, of twenty steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step, part, parts)
        optimizer.zero_grad()
        logits = model(tokens).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    return losses, norms


def shard(model: Transformer, mesh: Any, **options: Any) -> Transformer:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def by_ddp(rank: int) -> Any:
    return train(DistributedDataParallel(make_model(), bucket_cap_mb=0.02), rank, 2)


def by_fsdp(rank: int) -> Any:
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("all",))
    return train(shard(make_model(), mesh), rank, 2)


def by_fsdp_in_bfloat16(rank: int) -> Any:
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("all",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(make_model(), mesh, mp_policy=policy), rank, 2)


def by_hybrid(rank: int) -> Any:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(shard(make_model(), mesh), rank, 4)


def by_fsdp_over_tensor_parallel(rank: int) -> Any:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "model"))
    model = make_model()
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate()
            ),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["model"], plan)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["model"], plan)
    return train(shard(model, mesh["data"]), mesh.get_local_rank("data"), 2)


def by_fsdp_with_offload(rank: int) -> Any:
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("all",))
    return train(shard(make_model(), mesh, offload_policy=CPUOffloadPolicy()), rank, 2)


Run = Callable[[int], Any]


def on_device(rank: int, name: str) -> tuple[Any, dict[str, int]]:
    """A run with all of it on "tpu", and what fell back."""
    global DEVICE
    run = globals()[name]
    DEVICE = "tpu"
    torch.tpu.reset_fallback_counts()
    try:
        return run(rank), torch.tpu.fallback_counts()
    finally:
        DEVICE = "cpu"


@pytest.fixture(scope="module")
def gloo2() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo") as pool:
        yield pool


@pytest.fixture(scope="module")
def gloo4() -> Iterator[RankPool]:
    with RankPool(4, backend="gloo") as pool:
        yield pool


def assert_parity(got: list[Any], wanted: list[Any]) -> None:
    for (losses, norms), (wanted_losses, wanted_norms) in zip(got, wanted, strict=True):
        assert_close(losses, wanted_losses, rtol=1e-5, atol=0)
        assert_close(norms, wanted_norms, rtol=1e-4, atol=0)


@lru_cache
def alone() -> tuple[list[float], list[float]]:
    """The same training on the whole batch, in this process."""
    return train(make_model(), 0, 1)


def assert_learns_like_one_process(result: Any, rtol: float) -> None:
    losses, norms = result
    alone_losses, alone_norms = alone()
    assert alone_losses[-1] < 0.85 * alone_losses[0]
    assert_close(losses, alone_losses, rtol=rtol, atol=0)
    assert_close(norms, alone_norms, rtol=rtol * 10, atol=0)


@pytest.mark.parametrize("run", [by_ddp, by_fsdp], ids=lambda run: run.__name__)
def test_two_ranks_train_with_the_losses_of_gloo_and_of_one_process(
    pool2: RankPool, gloo2: RankPool, run: Run
) -> None:
    got = pool2(run)
    assert_parity(got, gloo2(run))
    assert_learns_like_one_process(got[0], rtol=1e-4)


def test_mixed_precision_trains_with_the_losses_of_gloo(pool2: RankPool, gloo2: RankPool) -> None:
    got = pool2(by_fsdp_in_bfloat16)
    assert_parity(got, gloo2(by_fsdp_in_bfloat16))
    assert got[0][0][-1] < 0.85 * got[0][0][0]


@pytest.mark.parametrize(
    "run", [by_hybrid, by_fsdp_over_tensor_parallel], ids=lambda run: run.__name__
)
def test_four_ranks_train_with_the_losses_of_gloo_and_of_one_process(
    pool4: RankPool, gloo4: RankPool, run: Run
) -> None:
    got = pool4(run)
    assert_parity(got, gloo4(run))
    assert_learns_like_one_process(got[0], rtol=1e-4)


@gloo_cannot("it has no tensors on 'tpu'")
@pytest.mark.parametrize(
    "run", [by_ddp, by_fsdp, by_fsdp_in_bfloat16], ids=lambda run: run.__name__
)
def test_two_ranks_train_on_the_device_as_on_the_cpu(
    pool2: RankPool, gloo2: RankPool, run: Run
) -> None:
    results = pool2(on_device, run.__name__)
    wanted = gloo2(run)
    rtol = 1e-2 if run is by_fsdp_in_bfloat16 else 1e-5
    for (got, fallbacks), (losses, _) in zip(results, wanted, strict=True):
        assert not fallbacks
        assert_close(got[0], losses, rtol=rtol, atol=0)


@gloo_cannot("it has no tensors on 'tpu'")
def test_parameters_may_wait_on_the_host(pool2: RankPool, gloo2: RankPool) -> None:
    wanted = gloo2(by_fsdp)
    for (got, _), (losses, _) in zip(pool2(on_device, "by_fsdp_with_offload"), wanted, strict=True):
        assert_close(got[0], losses, rtol=1e-5, atol=0)


@gloo_cannot("it has no tensors on 'tpu'")
@pytest.mark.parametrize(
    "run", [by_hybrid, by_fsdp_over_tensor_parallel], ids=lambda run: run.__name__
)
def test_four_ranks_train_on_the_device_as_on_the_cpu(
    pool4: RankPool, gloo4: RankPool, run: Run
) -> None:
    results = pool4(on_device, run.__name__)
    for (got, fallbacks), (losses, _) in zip(results, gloo4(run), strict=True):
        assert not fallbacks
        assert_close(got[0], losses, rtol=1e-5, atol=0)
