"""Views that begin elsewhere share programs: a loop over x[i] does not compile for every i."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

Tensor = torch.Tensor

TURNS = 40
FEW = 5  # an offset of 0, three that are constants, and one program for all others


def written(x: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    x = x.clone()
    call(x)
    return x


def padded(x: Tensor, i: int) -> Tensor:
    """Its last row is not all in the storage."""
    return torch.as_strided(x.flatten()[: 1600 - 7].clone(), (3, 4), (400, 1), i * 19 + 4) + 1


CALLS: dict[str, tuple[Callable[[Tensor, int], Any], int]] = {
    "a row": (lambda x, i: x[i] + 1, 1),
    "a column": (lambda x, i: x[:, i] + 1, 1),
    "a block": (lambda x, i: x[i // 2 : i // 2 + 7, i // 3 : i // 3 + 5] * 2, 1),
    "a block of a transpose": (lambda x, i: x.t()[i // 2 : i // 2 + 7, 3:9] * 2, 1),
    "an element": (lambda x, i: x[i, -i - 1] + 1, 1),
    "item": (lambda x, i: x[i, i].item(), 1),
    "cpu": (lambda x, i: x[i].cpu(), 1),
    "cpu, strided": (lambda x, i: x.t()[i].cpu(), 1),
    "windows": (lambda x, i: x.flatten().unfold(0, 8, 3)[i : i + 3] + 1, 1),
    "overlapping windows": (lambda x, i: torch.as_strided(x, (5, 4), (2, 3), i) + 1, 1),
    "odd strides": (lambda x, i: torch.as_strided(x, (3, 4), (100, 7), i) + 1, 1),
    "to the end": (padded, 2),
    "as bytes": (lambda x, i: x[i].view(torch.uint8)[4:] + 1, 1),
    "two of one": (lambda x, i: torch.cat([x[i], x[(i + 1) % TURNS]]), 6),
    "a list": (lambda x, i: torch._foreach_add([x[i], x[-i - 1]], 1)[1], 6),
    "broadcast": (lambda x, i: x * x[i], 1),
    "filled": (lambda x, i: written(x, lambda y: y[i].fill_(3)), 1),
    "a column times": (lambda x, i: written(x, lambda y: y[:, i].mul_(2)), 1),
    "a block plus": (lambda x, i: written(x, lambda y: y[i : i + 1, 2:9].add_(1)), 1),
    "copied within": (lambda x, i: written(x, lambda y: y[i].copy_(y[-i - 1])), 6),
    "copied into": (lambda x, i: written(x, lambda y: y[i].copy_(x[3])), 2),
    "out=": (lambda x, i: written(x, lambda y: torch.add(x[0], 1, out=y[i])), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_loop_over_offsets_compiles_few_programs(name: str) -> None:
    call, times = CALLS[name]
    theirs = torch.arange(1600.0).reshape(40, 40) / 7
    ours = theirs.to("tpu")
    before = torch.tpu.num_compiled_programs()
    for i in range(TURNS):
        got, wanted = call(ours, i), call(theirs, i)
        assert_close(got.cpu() if isinstance(got, Tensor) else got, wanted, rtol=0, atol=0)
    assert torch.tpu.num_compiled_programs() - before <= FEW * times + 2


def test_gradients_of_a_loop() -> None:
    def run(device: str) -> tuple[Tensor, int]:
        x = torch.arange(600.0).reshape(20, 30).to(device).requires_grad_()
        state = torch.zeros(30, device=device)
        before = torch.tpu.num_compiled_programs()
        for i in range(20):
            state = torch.tanh(state + x[i] / 100)
        state.sum().backward()
        assert x.grad is not None
        return x.grad.cpu(), torch.tpu.num_compiled_programs() - before

    (theirs, _), (ours, programs) = run("cpu"), run("tpu")
    assert_close(ours, theirs)
    assert programs < 60  # select_backward writes into zeros, at twenty places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    theirs = (torch.arange(200) % 5).to(dtype).reshape(20, 10)
    ours = theirs.to("tpu")
    for i in range(20):
        assert torch.equal(ours[i].clone().cpu(), theirs[i])
        ours[i].copy_(ours[i - 1])
        theirs[i].copy_(theirs[i - 1])
    assert torch.equal(ours.cpu(), theirs)
