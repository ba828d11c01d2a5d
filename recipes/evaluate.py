"""Validation: the loss on every held-out window, over all processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_dist.recipes.data import IGNORED_TARGET, Windows, evaluation_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The mean loss of a held-out token, in nats, over so many of them."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Of the loss; infinite where it would overflow."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over the targets, in float32; padding counts nothing."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="sum",
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Windows, *, batch_size: int, device: torch.device
) -> Validation:
    """Score every window once. Collective; blocks until the result is there.

    Args:
        model: The same on every process, sharded or not.
        windows: The same on every process; shared out here.
        batch_size: Windows in one forward pass of one process.
        device: Where the model is.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    batches = evaluation_batches(
        windows, batch_size=batch_size, rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    for batch in batches:
        total += summed_loss(model(batch.inputs.to(device)), batch.targets.to(device))
    dist.all_reduce(total)
    return Validation(loss=total.item() / windows.num_targets, num_tokens=windows.num_targets)
