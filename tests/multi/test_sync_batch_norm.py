"""torch.nn.SyncBatchNorm on the device: as one process's BatchNorm over all ranks' samples."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool, gloo_cannot
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import assert_close

pytestmark = gloo_cannot("SyncBatchNorm refuses tensors on the CPU")

CHANNELS = 3


def samples(counts: list[int], dims: int) -> list[Tensor]:
    """Each rank's, (samples, channels, ...); not of mean 0 and variance 1."""
    torch.manual_seed(7)
    return [3 + 2 * torch.randn(count, CHANNELS, *[4] * dims) for count in counts]


def check_layer(rank: int, counts: list[int], dims: int, layer: nn.SyncBatchNorm) -> None:
    whole = nn.BatchNorm1d if dims < 2 else nn.BatchNorm2d
    expected = whole(CHANNELS, affine=layer.affine, momentum=layer.momentum)
    expected.load_state_dict(layer.state_dict())
    layer = copy.deepcopy(layer).to("tpu")
    for _ in range(2):  # the running statistics of one step matter in the next
        shares = samples(counts, dims)
        everything = torch.cat(shares).requires_grad_()
        weights = torch.randn_like(everything)
        (expected(everything) * weights).sum().backward()

        mine = shares[rank].to("tpu").requires_grad_()
        (layer(mine) * weights.split(counts)[rank].to("tpu")).sum().backward()

        assert everything.grad is not None
        close = {"rtol": 1e-4, "atol": 1e-4}
        if counts[rank]:  # else torch leaves it None
            assert mine.grad is not None
            assert_close(mine.grad.cpu(), everything.grad.split(counts)[rank], **close)
        for name, parameter in layer.named_parameters():
            total = torch.zeros(CHANNELS, device="tpu")
            if parameter.grad is not None:
                total = parameter.grad.clone()
            dist.all_reduce(total)
            assert_close(total.cpu(), expected.get_parameter(name).grad, **close)
            parameter.grad = None
        expected.zero_grad()
    for name, buffer in layer.named_buffers():
        assert_close(buffer.cpu(), expected.get_buffer(name), rtol=1e-4, atol=1e-5)
    test = samples([5], dims)[0]
    assert_close(layer.eval()(test.to("tpu")).cpu(), expected.eval()(test), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("counts", "dims", "layer"),
    [
        ([4, 4], 2, nn.SyncBatchNorm(CHANNELS)),
        ([1, 6], 1, nn.SyncBatchNorm(CHANNELS, momentum=0.3)),
        ([0, 6], 0, nn.SyncBatchNorm(CHANNELS)),
        ([2, 5], 2, nn.SyncBatchNorm(CHANNELS, affine=False)),
    ],
    ids=["even", "uneven", "one rank has none", "not affine"],
)
def test_it_normalises_over_all_ranks(
    pool2: RankPool, counts: list[int], dims: int, layer: nn.SyncBatchNorm
) -> None:
    pool2(check_layer, counts, dims, layer)


def check_narrow(rank: int, dtype: torch.dtype) -> None:
    layer = nn.SyncBatchNorm(CHANNELS).to("tpu")
    shares = samples([4, 6], 2)
    got = layer(shares[rank].to("tpu", dtype))
    assert got.dtype == dtype
    expected = nn.BatchNorm2d(CHANNELS)(torch.cat(shares)).split([4, 6])[rank]
    assert_close(got.float().cpu(), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_samples_have_wide_statistics(pool2: RankPool, dtype: torch.dtype) -> None:
    pool2(check_narrow, dtype)


def convolutions() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
    )


def check_ddp(rank: int) -> None:
    counts = [3, 3]
    alone = convolutions()
    together = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(convolutions()).to("tpu"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, together)]
    torch.tpu.reset_fallback_counts()
    for _ in range(5):
        shares = samples(counts, 2)
        losses = (alone(torch.cat(shares)).square(), together(shares[rank].to("tpu")).square())
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
    assert not torch.tpu.fallback_counts()
    for expected, got in zip(alone.parameters(), together.parameters(), strict=True):
        assert_close(got.detach().cpu(), expected.detach(), rtol=1e-3, atol=1e-4)


def test_a_converted_model_trains_under_ddp_as_in_one_process(pool2: RankPool) -> None:
    pool2(check_ddp)
