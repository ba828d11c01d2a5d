"""The models people train, whole: natively, with the CPU's losses, in constant memory."""

import copy
import gc
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, TOKENS, LENGTH = 16, 2, 23, 8


def rotate(x: Tensor) -> Tensor:
    """Rotary positions by halves, as Llama's and Qwen's checkpoints have them."""
    half = x.shape[-1] // 2
    rates = 1 / 10000 ** (torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).type_as(x)


class Attention(nn.Module):
    """Grouped queries; Qwen3 normalises queries and keys, Llama does not."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 2 * HEADS * 8, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * HEADS * 8, bias=False)
        self.out = nn.Linear(2 * HEADS * 8, WIDTH, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(8) if normalised else nn.Identity() for _ in "qk"])

    def forward(self, x: Tensor) -> Tensor:
        q = self.norms[0](self.q(x).unflatten(-1, (-1, 8))).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS, 8)).unbind(-3)
        k, v = self.norms[1](k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """DeepSeek's attention: keys and values from a latent, positions in dims of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_up = nn.Linear(WIDTH, 8), nn.Linear(8, HEADS * 12)
        self.q_norm, self.kv_norm = nn.RMSNorm(8), nn.RMSNorm(8)
        self.kv_down, self.kv_up = nn.Linear(WIDTH, 8 + 4), nn.Linear(8, HEADS * 16)
        self.out = nn.Linear(HEADS * 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (HEADS, 12)).transpose(1, 2)
        plain, turned = q.split([8, 4], dim=-1)
        latent, key = self.kv_down(x).split([8, 4], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (HEADS, 16)).transpose(1, 2)
        k, v = kv.split([8, 8], dim=-1)
        shared = rotate(key.unsqueeze(1)).expand(-1, HEADS, -1, -1)
        q, k = torch.cat([plain, rotate(turned)], -1), torch.cat([k, shared], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=12**-0.5)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two of four for each token; DeepSeek adds a bias to choose by, and an expert for all."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([FeedForward() for _ in range(4)])
        self.shared = FeedForward() if biased else None
        self.register_buffer("bias", torch.zeros(4) if biased else None)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).float()
        scores = scores.softmax(-1) if self.bias is None else scores.sigmoid()
        chosen = (scores if self.bias is None else scores + self.bias).topk(2, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat) if self.shared is None else self.shared(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            brought = expert(flat[token]) * weights[token, rank, None].type_as(flat)
            out = out.index_add(0, token, brought.type_as(out))
        self.load = torch.bincount(chosen.detach().flatten(), minlength=4).float()
        return out.view_as(x)

    def balance(self) -> None:
        """Who had too little is chosen more; after a step, as checkpointed forwards run twice."""
        if self.bias is not None:
            self.bias += 1e-3 * torch.sign(self.load.mean() - self.load)


class Decoder(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], feed: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(3)])
        self.attention, self.feed = attention(), feed()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def layer(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.layer, self.embedding(tokens), use_reentrant=False)
        return self.head(self.norms[2](x)).flatten(0, 1)


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.places
        x = checkpoint(self.layer, x, use_reentrant=False)
        return self.head(self.norm(x)[:, 0])


class Bottleneck(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.side = nn.Sequential(nn.Conv2d(width, 16, 1, stride, bias=False), nn.BatchNorm2d(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x), inplace=True)


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1), Bottleneck(8, 1), Bottleneck(16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, TOKENS),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama-3": lambda: Decoder(lambda: Attention(normalised=False), FeedForward),
    "Qwen3": lambda: Decoder(lambda: Attention(normalised=True), FeedForward),
    "Qwen3 MoE": lambda: Decoder(lambda: Attention(normalised=True), lambda: Experts(biased=False)),
    "DeepSeek-V3": lambda: Decoder(Latent, lambda: Experts(biased=True)),
    "ViT": VisionTransformer,
    "ResNet": resnet,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def batch_of(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name in ("ViT", "ResNet"):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        return images, torch.randint(0, TOKENS, (4,), generator=generator)
    tokens = torch.randint(0, TOKENS, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def train(
    model: nn.Module, optimizer: str, batch: tuple[Tensor, Tensor], device: str, *, autocast: bool
) -> list[float]:
    own = copy.deepcopy(model).to(device)
    steps = OPTIMIZERS[optimizer](own.parameters())
    x, target = batch[0].to(device), batch[1].to(device)
    losses = []
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(own(x).float(), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        steps.step()
        steps.zero_grad()
        for module in own.modules():
            if isinstance(module, Experts):
                module.balance()
        losses += [loss.item(), norm.item()]
    return losses


def later(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


# Each model with each way of an optimizer, and half of them under autocast.
@pytest.mark.parametrize(
    ("name", "optimizer", "autocast"),
    [
        ("Llama-3", "AdamW fused", False), later("Llama-3", "AdamW foreach", True),
        later("Qwen3", "AdamW foreach", False), later("Qwen3", "AdamW fused", True),
        later("Qwen3 MoE", "AdamW fused", False), ("Qwen3 MoE", "AdamW foreach", True),
        ("DeepSeek-V3", "AdamW foreach", False), later("DeepSeek-V3", "AdamW fused", True),
        ("ViT", "AdamW fused", True), later("ViT", "SGD foreach", False),
        later("ResNet", "SGD fused", True), ("ResNet", "SGD foreach", False),
    ],
)  # fmt: skip
def test_a_model_trains_natively_as_on_the_cpu(name: str, optimizer: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), batch_of(name)
    theirs = train(model, optimizer, batch, "cpu", autocast=autocast)
    torch.tpu.reset_fallback_counts()
    ours = train(model, optimizer, batch, "tpu", autocast=autocast)
    assert not torch.tpu.fallback_counts()
    assert ours == pytest.approx(theirs, rel=3e-2 if autocast else 1e-4)


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_a_thousand_steps_take_no_more_memory_than_a_hundred() -> None:
    torch.manual_seed(0)
    model = Decoder(lambda: Attention(normalised=False), FeedForward).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = batch_of("Llama-3")
    x, target = (part.to("tpu") for part in batch)

    def steps(number: int) -> tuple[int, int, int]:
        for _ in range(number):
            F.cross_entropy(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.tpu.synchronize()
        gc.collect()
        stats = torch.tpu.memory_stats()
        return torch.tpu.memory_allocated(), stats["active_bytes.all.peak"], resident()

    live, _, memory = steps(100)
    programs = torch.tpu.num_compiled_programs()
    for _ in range(3):
        torch.tpu.reset_peak_memory_stats()
        last_live, last_peak, last_memory = steps(300)
        assert last_live <= live and last_peak <= live
    assert torch.tpu.num_compiled_programs() == programs
    assert last_memory - memory < 16 << 20
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert last_live < 4 * parameters + (64 << 10)  # with the optimizer's states; and constants


def test_views_do_not_keep_freed_storages_alive() -> None:
    gc.collect()
    before = torch.tpu.memory_allocated()
    for _ in range(20):
        x = torch.ones(1 << 16, device="tpu")
        views = [x[1:], x.view(256, 256).t(), x.detach(), x.data]
        x.untyped_storage().resize_(0)
        assert torch.tpu.memory_allocated() - before < 1 << 16
        del views
