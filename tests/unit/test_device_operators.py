"""Operators on "tpu" do what they do on the CPU, natively, and compile once."""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    """Nothing here may run on the CPU; a test that wants to says so by taking the counts."""
    torch.tpu.reset_fallback_counts()
    yield
    assert not torch.tpu.fallback_counts()


def both(function: Callable[[Any], Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.manual_seed(0)
    theirs = function("cpu")
    torch.manual_seed(0)
    ours = function("tpu")
    torch.testing.assert_close(
        torch.utils._pytree.tree_map(lambda t: t.cpu() if isinstance(t, Tensor) else t, ours),
        theirs,
        rtol=rtol,
        atol=atol,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "name", ["add", "mul", "maximum", "eq", "lt", "where", "add_", "masked_fill_"]
)
def test_pointwise(name: str, dtype: torch.dtype) -> None:
    a = torch.tensor([[0, 1, 2], [3, 1, 0]]).to(dtype)
    b = torch.tensor([1, 1, 0]).to(dtype)
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "where": lambda x, y: torch.where(x > y, x, y),
        "masked_fill_": lambda x, y: x.clone().masked_fill_(y > 0, 1),
        "add_": lambda x, y: x.clone().t().add_(y.sum().to(x.dtype)),
    }
    call = calls.get(name, getattr(torch, name, None))
    assert call is not None
    both(lambda d: call(a.to(d), b.to(d)))


@pytest.mark.parametrize("left", [torch.bool, torch.int32, torch.float16, torch.float32])
@pytest.mark.parametrize("right", [2, 2.5, True, torch.int64, torch.bfloat16, torch.float64])
def test_promotion_is_torchs(left: torch.dtype, right: Any) -> None:
    def run(d: str) -> list[Tensor]:
        x = torch.tensor([0, 1, 1]).to(d).to(left)
        y = torch.tensor([1, 1, 0]).to(d).to(right) if isinstance(right, torch.dtype) else right
        scalar = torch.tensor(1).to(left).to(d)
        return [x + y, x * y, x / 1, scalar + y, x == y, torch.tensor(2.0) * x]

    both(run, rtol=1e-2)


def test_out_is_resized_cast_and_checked() -> None:
    def run(d: str) -> list[Tensor]:
        a = torch.arange(6.0).reshape(2, 3).to(d)
        out = torch.empty(0, device=d)
        torch.add(a, 1, out=out)
        strided = torch.zeros(3, 2, device=d).t()
        torch.mul(a, 2, out=strided)
        wide = torch.zeros(2, 3, dtype=torch.float64, device=d)
        torch.exp(a, out=wide)
        part = torch.zeros(4, 3, device=d)
        torch.sub(a, 1, out=part[1:3])
        values, places = torch.empty(0, device=d), torch.empty(0, dtype=torch.int64, device=d)
        torch.sort(a, descending=True, out=(values, places))
        return [out, strided, wide, part, values, places]

    both(run)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(torch.ones(2, device="tpu"), 1.5, out=torch.ones(2, dtype=torch.int64).to("tpu"))


def ones(size: Any, device: str) -> Tensor:
    return torch.ones(size, device=device)


def index(value: int, device: str) -> Tensor:
    return torch.tensor([value], device=device)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (RuntimeError, "must match the size", lambda d: ones(2, d) + ones(3, d)),
        (RuntimeError, "cannot be multiplied", lambda d: ones((2, 3), d) @ ones((2, 3), d)),
        (IndexError, "out of bounds for dimension 0", lambda d: ones(3, d)[index(5, d)]),
        (IndexError, "index 7 is out of bounds", lambda d: ones(3, d)[7]),
        (IndexError, "out of range in self", lambda d: F.embedding(index(9, d), ones((4, 2), d))),
        (IndexError, "Target 8 is out", lambda d: F.cross_entropy(ones((1, 4), d), index(8, d))),
        (RuntimeError, "out of bounds for dimension 1", lambda d: ones((1, 3), d).gather(
            1, index(4, d)[None])),
        (RuntimeError, "can't be cast", lambda d: ones(2, d).long().add_(1.5)),
        (RuntimeError, "invalid for input of size", lambda d: ones(6, d).view(4)),
    ],
)  # fmt: skip
def test_bad_input_raises_what_it_raises_on_the_cpu(
    error: type[Exception], match: str, call: Callable[[str], Any]
) -> None:
    for device in ("cpu", "tpu"):
        with pytest.raises(error, match=match):
            call(device)


def test_tensors_of_other_devices_are_refused_but_for_single_numbers() -> None:
    x = torch.ones(3, device="tpu")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="device"):
        torch.add(x, x, out=torch.ones(3))
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert x[torch.tensor([0, 2])].tolist() == [1, 1]  # indices may be on the CPU, as for CUDA


def test_indexing() -> None:
    def run(d: str) -> list[Tensor]:
        x = torch.arange(60.0).reshape(3, 4, 5).to(d)
        rows, columns = torch.tensor([0, 2, -1]).to(d), torch.tensor([1, 1, 3]).to(d)
        mask = (x[:, :, 0] > 10).to(d)
        written = x.clone()
        written[rows, columns] = -1
        written[mask] = 5
        written[:, columns] += 1
        written[..., 2] = torch.arange(4.0).to(d)
        added = torch.zeros(4, device=d).index_put_((columns,), torch.ones(3, device=d), True)
        return [x[rows], x[rows, columns], x[:, rows[:2], None], x[mask], written, added,
                x[rows[:, None], :, columns], torch.nonzero(mask), x.masked_select(x > 30),
                x.take_along_dim(rows[None, :, None], 1),
                x.index_select(1, rows[:2].abs()),
                torch.zeros(5, 5, device=d).scatter_add_(
                    0, rows[None, :2].expand(3, 2) % 3, x[0, :3, :2]),
                x.flatten().scatter_reduce(0, rows.abs(), torch.ones(3, device=d), "amax"),
                ]  # fmt: skip

    both(run)


def test_reductions_keep_torchs_dtypes_and_nan() -> None:
    def run(d: str) -> list[Any]:
        x = torch.tensor([[1.0, float("nan"), 3], [4, 2, 0]]).to(d)
        i = torch.tensor([[1, 0], [1, 1]]).to(d)
        return [x.sum(), x.max(1), x.argmax(0), x.amin(1), i.sum(), i.bool().sum(0), i.prod(1),
                x[1].var(), x[1].std(0, unbiased=False), i.any(1), i.all(), x.nansum(1),
                x.cumsum(1), x.cummax(1), x.sort(1, descending=True), x.median(1), x.topk(2, 1),
                torch.linalg.vector_norm(x[1]), x[1].logsumexp(0), x.mean(0),
                i.bool().cumsum(0), x[1].softmax(0), x[1].bfloat16().sum()]  # fmt: skip

    both(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["plain", "causal", "grouped", "bool mask", "float mask", "masked row"]
)
def test_attention_forwards_and_backwards(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shared = 2 if case == "grouped" else 4
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, shared, shared))
    mask = None
    if case in ("bool mask", "masked row"):
        mask = torch.rand(2, 1, 6, 6) > 0.4
        mask[..., 0] = True
    if case == "masked row":
        mask[0, 0, 2] = False
    if case == "float mask":
        mask = torch.randn(6, 6)

    def run(d: str) -> list[Tensor]:
        leaves = [t.to(dtype).to(d).detach().requires_grad_() for t in (q, k, v)]
        m = None if mask is None else (mask if mask.dtype is torch.bool else mask.to(dtype)).to(d)
        out = F.scaled_dot_product_attention(
            *leaves, attn_mask=m, is_causal=case == "causal", enable_gqa=case == "grouped"
        )
        (out.float() * torch.arange(8.0, device=d)).sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    tolerance = 1e-4 if dtype is torch.float32 else 6e-2
    both(run, rtol=tolerance, atol=tolerance)


class Block(torch.nn.Module):
    """What a transformer's layer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 16, padding_idx=0)
        self.norm, self.rms = torch.nn.LayerNorm(16), torch.nn.RMSNorm(16)
        self.qkv = torch.nn.Linear(16, 48)
        self.w1, self.w2, self.w3 = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = self.rms(x)
        return self.out(x + self.w2(F.silu(self.w1(y)) * self.w3(y)))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW amsgrad fused": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_cpu_and_compiles_in_two_steps(name: str) -> None:
    torch.manual_seed(0)
    model = Block()
    tokens = torch.randint(0, 11, (4, 7))
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "tpu"):
        own = copy.deepcopy(model).to(device)
        optimizer = OPTIMIZERS[name](own.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        losses[device], batch = [], tokens.to(device)
        for step in range(6):
            loss = F.cross_entropy(own(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses[device].append(loss.item())
            if step == 3:  # gradients were there in one step, and not in another
                compiled = torch.tpu.num_compiled_programs()
        assert torch.tpu.num_compiled_programs() == compiled
    assert losses["tpu"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_a_convolutional_network_trains_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1, stride=2), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 8, 3, groups=4), torch.nn.GELU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4),
    )  # fmt: skip
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])

    def run(d: str) -> list[Tensor]:
        own = copy.deepcopy(model).to(d)
        for _ in range(2):
            F.cross_entropy(own(images.to(d)), labels.to(d)).backward()
        own.eval()
        return [own(images.to(d)), *(p.grad for p in own.parameters()), *own.buffers()]

    both(run, rtol=1e-3, atol=1e-5)


def test_bfloat16_is_a_float_everywhere() -> None:
    def run(d: str) -> list[Any]:
        x = torch.tensor([[1.0, float("nan"), 3], [4, 2.5, 0]]).bfloat16().to(d)
        image = torch.arange(16.0).reshape(1, 1, 4, 4).bfloat16().to(d)
        index = torch.tensor([[0, 0, 1]]).to(d)
        mean = torch.zeros(2, 3).bfloat16().to(d).scatter_reduce(0, index, x[1:], "mean")
        return [x.argmax(1), x.max(1), x.cummax(1), x.median(1), mean, x.sort(1),
                F.max_pool2d(image, 3), F.avg_pool2d(image, 3), x.nan_to_num()]  # fmt: skip

    both(run, rtol=1e-2)


def test_ranges_of_several_lengths() -> None:
    calls = [(5,), (0, 30, 6), (0, 2, 2), (1.5, 4), (4, 0, -1), (0, 1, 0.25), (3, 3)]
    both(lambda d: [torch.arange(*numbers, device=d) for numbers in calls])
    both(lambda d: [torch.linspace(0, end, n, device=d) for end in (1, 2) for n in (1, 4)])
    both(lambda d: [torch.full((2,), x, device=d) for x in (1.5, 2.5)] + [torch.eye(2, 3).to(d)])


def test_integer_powers_wrap_and_far_polygammas_are_right() -> None:
    base, exponent = torch.tensor([2, 3, -1, 1, 0, -2, 5]), torch.tensor([64, 3, -3, -2, 0, 2, 40])
    both(lambda d: [base.to(d) ** exponent.to(d), 2 ** exponent.to(d), base.to(d) ** 3])
    far = torch.tensor([-20.3, -8.4784, -3.7, 0.4, 7.0])
    both(lambda d: [torch.polygamma(n, far.to(d)) for n in (0, 1, 2, 3)], rtol=1e-4)


def test_checkpointing_draws_the_same_dropout_again() -> None:
    from torch.utils.checkpoint import checkpoint

    grads = []
    for recompute in (False, True):
        torch.manual_seed(3)
        x = torch.ones(4, 32, device="tpu", requires_grad=True)

        def drop(y: Tensor) -> Tensor:
            return F.dropout(y * 2, 0.5).exp()

        out = checkpoint(drop, x, use_reentrant=False) if recompute else drop(x)
        out.sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0].cpu(), grads[1].cpu())
    assert 20 < (grads[0] == 0).sum().item() < 108


def test_autocast_narrows_products_and_widens_losses() -> None:
    linear = torch.nn.Linear(4, 4).to("tpu")
    x = torch.ones(2, 4, device="tpu", requires_grad=True)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        y = linear(x)
        z = torch.softmax(y, -1)
        assert (y.dtype, z.dtype, (y + x).dtype) == (torch.bfloat16, torch.float32, torch.float32)
    z.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.float32


def test_random_numbers_follow_the_seed_and_are_spread_as_asked() -> None:
    torch.manual_seed(5)
    first = torch.rand(1000, device="tpu"), torch.randn(1000, device="tpu")
    state = torch.tpu.get_rng_state()
    second = torch.rand(1000, device="tpu")
    torch.tpu.set_rng_state(state)
    assert torch.equal(second.cpu(), torch.rand(1000, device="tpu").cpu())
    torch.manual_seed(5)
    assert torch.equal(first[0].cpu(), torch.rand(1000, device="tpu").cpu())
    assert not torch.equal(first[0].cpu(), second.cpu())
    uniform, normal = first[0].cpu(), first[1].cpu()
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.05
    assert abs(normal.mean()) < 0.15 and abs(normal.std() - 1) < 0.1
    drawn = torch.randint(3, 7, (500,), device="tpu").cpu()
    assert set(drawn.tolist()) == {3, 4, 5, 6}
    assert sorted(torch.randperm(50, device="tpu").tolist()) == list(range(50))
    assert abs(torch.full((2000,), 0.3, device="tpu").bernoulli().mean().item() - 0.3) < 0.05
    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        torch.rand(3, device="tpu")
    generators = [torch.Generator(device="tpu").manual_seed(9) for _ in range(2)]
    assert generators[0].device.type == "tpu" and isinstance(generators[0], torch.Generator)
    a, b = (torch.randn(4, device="tpu", generator=g) for g in generators)
    assert torch.equal(a.cpu(), b.cpu())
    assert isinstance(torch.default_generator, torch.Generator)


def test_float32_products_are_float32_unless_asked_otherwise() -> None:
    a = torch.randn(64, 64)
    theirs = (a.double() @ a.double()).float()
    assert torch.get_float32_matmul_precision() == "highest"
    ours = (a.to("tpu") @ a.to("tpu")).cpu()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    before = torch.tpu.num_compiled_programs()
    with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
        a.to("tpu") @ a.to("tpu")
    assert torch.tpu.num_compiled_programs() == before + 1, "another precision, another program"


def test_a_thousand_steps_hold_memory_flat() -> None:
    import gc

    x = torch.ones(64, 64, device="tpu")

    def step() -> None:
        y = (x @ x.t()).requires_grad_()
        (y[1:] * 2).sum().backward()
        y.detach()[0].add_(1)

    for _ in range(20):
        step()
    gc.collect()
    before = torch.tpu.memory_allocated()
    for _ in range(1000):
        step()
    gc.collect()
    assert torch.tpu.memory_allocated() <= before


def test_a_view_does_not_keep_a_freed_array() -> None:
    x = torch.ones(1024, 1024, device="tpu")
    before = torch.tpu.memory_allocated()
    view = x[1:]
    x.untyped_storage().resize_(0)
    assert torch.tpu.memory_allocated() <= before - x.numel() * 4
    assert view.shape == (1023, 1024)


def test_compiling_stops_when_shapes_repeat() -> None:
    x = torch.ones(8, 8, device="tpu")
    for step in range(4):
        y = x * (0.1 + step) + step
        y[1:3].add_(step * 1.5)
        torch.clamp(y, max=float(step))
        if step == 0:
            before = torch.tpu.num_compiled_programs()
    assert torch.tpu.num_compiled_programs() == before


def test_nothing_warns_of_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.ones(4, device="tpu", requires_grad=True)
        (x * 2).sum().backward()


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": lambda x: x.sin(),
    "a tuple": lambda x: x.topk(2),
    "a list": lambda x: torch.ops.aten.unbind_copy.int(x),
    "lists": lambda x: torch._foreach_add([x, x], 1.0),
    "a written one": lambda x: x.clone().mul_(2),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_let_go_with_their_last_name_without_the_garbage_collector(kind: str) -> None:
    """Trainers turn the collector off: what waits for it is a leak."""
    x = torch.arange(12.0).view(3, 4).to("tpu")
    function = RESULTS[kind]
    function(x)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(found) is Tensor for found in gc.get_objects())
        for _ in range(3):
            function(x)
        after = sum(type(found) is Tensor for found in gc.get_objects())
    finally:
        gc.enable()
    assert after == before


def test_bincount() -> None:
    numbers, weights = torch.tensor([3, 0, 3, 1]), torch.tensor([0.5, 1, 2, 4])
    for kind in (torch.int64, torch.uint8):
        x = numbers.to(kind)
        both(lambda d, x=x: [torch.bincount(x.to(d)), torch.bincount(x.to(d), minlength=7)])
        both(lambda d, x=x: torch.bincount(x.to(d), weights.to(d), minlength=2))
        both(lambda d, x=x: torch.bincount(x.to(d), weights.to(d).double()))
        both(lambda d, x=x: torch.bincount(x.to(d)[:0], minlength=2))
