"""What large models are made of, forwards and backwards: natively, with the CPU's gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

WIDTH, EXPERTS, TOP = 16, 4, 2


class Experts(nn.Module):
    """A mixture of experts: tokens sorted by expert, products of groups, put back by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = torch.sigmoid(self.gate(flat).float())
        weights, chosen = torch.topk(scores, TOP, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.histc(chosen.flatten().float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        with torch.no_grad():
            self.load.add_(counts)
        order = torch.argsort(chosen.flatten(), stable=True)
        source = order // TOP
        routed = flat.gather(0, source[:, None].expand(-1, WIDTH))
        ends = torch.cumsum(counts, 0).to(torch.int32)
        hidden = F.silu(torch._grouped_mm(routed.bfloat16(), self.up.bfloat16(), offs=ends))
        out = torch._grouped_mm(hidden, self.down.bfloat16(), offs=ends).float()
        out = out * weights.flatten()[order][:, None]
        result = torch.zeros_like(flat)
        return result.scatter_add(0, source[:, None].expand(-1, WIDTH), out).view_as(x)


class Rotary(nn.Module):
    """Attention with rotated queries and keys, by complex numbers, and grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(8)
        angles = torch.outer(torch.arange(6.0), 1 / 10 ** torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns[:, None]).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.q(x).unflatten(-1, (2, 8)))
        k, v = self.kv(x).unflatten(-1, (1, 2, 8)).unbind(-2)
        parts = (self.rotate(q), self.rotate(k), v)
        heads = [t.transpose(1, 2) for t in parts]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Patches(nn.Module):
    """A vision transformer's ends: patches by convolution, a class token, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        image = x.flatten(1)[:, : 3 * 64].view(-1, 3, 8, 8)
        patches = self.patch(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.layer(tokens)[:, 0]


@pytest.mark.parametrize("kind", [Experts, Rotary, Patches], ids=lambda kind: kind.__name__)
def test_a_part_of_a_model_is_native_and_has_the_cpus_gradients(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    theirs = kind()
    ours = copy.deepcopy(theirs).to("tpu")
    x = torch.randn(2, 6, WIDTH) if kind is not Patches else torch.randn(2, 12, WIDTH)
    torch.tpu.reset_fallback_counts()
    results = []
    for model, device in ((theirs, "cpu"), (ours, "tpu")):
        leaf = x.to(device).detach().requires_grad_()
        out = model(leaf)
        (out * out).sum().backward()
        tensors = [out, leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()]
        results.append([t.detach().cpu() for t in tensors if t is not None])
    assert not torch.tpu.fallback_counts()
    tolerance = 5e-2 if kind is Experts else 1e-4  # its products are of bfloat16
    assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)
