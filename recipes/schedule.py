"""The optimizer's settings and the learning rate at each step: warm-up, then half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its schedule, and gradient clipping.

    Attributes:
        learning_rate: The peak, reached at the end of the warm-up.
        final_learning_rate_ratio: What part of the peak the last step has.
        warmup_ratio: What part of the steps is linear warm-up.
        weight_decay: On matrices; norms have none.
        max_gradient_norm: The gradient is scaled down to this norm.
    """

    learning_rate: float = 3e-3
    final_learning_rate_ratio: float = 0.1
    warmup_ratio: float = 0.1
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_gradient_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, got {value}")
        if not 0 <= self.final_learning_rate_ratio <= 1:
            raise ValueError(
                f"final_learning_rate_ratio must be 0 to 1, got {self.final_learning_rate_ratio}"
            )
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio must be 0 to below 1, got {self.warmup_ratio}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")


def learning_rate_at(step: int, *, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of a step, a pure function, so nothing of it needs saving.

    Args:
        step: 1 for the first step, ``num_steps`` for the last.
        num_steps: Steps in the run.
        config: The peak, the warm-up and the end.
    """
    if not 1 <= step <= num_steps:
        raise ValueError(f"step must be 1 to {num_steps}, got {step}")
    warmup_steps = int(config.warmup_ratio * num_steps)
    if step <= warmup_steps:
        return config.learning_rate * step / warmup_steps
    progress = (step - warmup_steps) / (num_steps - warmup_steps)
    final = config.final_learning_rate_ratio
    return config.learning_rate * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over a model's parameters, sharded or not; decay on matrices only."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        foreach=True,
    )
