"""Fused optimizers with a learning rate that is a tensor, as schedulers under compilation have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

RATES: dict[str, Callable[[str], torch.Tensor]] = {
    "on the CPU": lambda device: torch.tensor(0.1),
    "on the device": lambda device: torch.tensor(0.1, device=device),
    "1-d on the CPU": lambda device: torch.tensor([0.1]),
    "1-d on the device": lambda device: torch.tensor([0.1], device=device),
    "float64": lambda device: torch.tensor(0.1, dtype=torch.float64),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_that_is_a_tensor(name: str, rate: str) -> None:
    kind, options = OPTIMIZERS[name]

    def run(device: str) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).to(device)
        lr = RATES[rate](device)
        optimizer = kind(model.parameters(), lr=lr, fused=True, **options)  # type: ignore[call-arg]
        programs = 0
        for step in range(5):
            before = torch.tpu.num_compiled_programs()
            model(torch.ones(2, 4, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            lr.mul_(0.5)
            if step > 1:
                programs += torch.tpu.num_compiled_programs() - before
        return [p.detach().cpu() for p in model.parameters()], programs

    torch.tpu.reset_fallback_counts()
    theirs, _ = run("cpu")
    ours, programs = run("tpu")
    assert_close(ours, theirs)
    assert not torch.tpu.fallback_counts() and not programs
