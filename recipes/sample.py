"""Text from a model: greedy or at a temperature, for people to look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from tpu_dist.recipes.model import DecoderLM


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """What to write after training.

    Attributes:
        prompt: What to continue.
        num_tokens: Tokens to add; 0 for no sample.
        temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
    """

    prompt: str = "In the beginning"
    num_tokens: int = 120
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if self.num_tokens < 0:
            raise ValueError(f"sample_tokens must not be negative, got {self.num_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must not be negative, got {self.temperature}")


@torch.no_grad()
def continue_tokens(
    model: DecoderLM,
    prompt: Sequence[int],
    config: SampleConfig,
    *,
    stop_at: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Continue a prompt, one forward pass a token.

    Every process must call this alike. A sharded model's parameters are gathered once and stay
    whole afterwards, so this is for the end of a run. The forward pass always has the model's full
    length, so a compiling device compiles once.

    Args:
        model: Sharded or not.
        prompt: At least one token; the newest that fit are seen.
        config: How many to add, and how.
        stop_at: A token to stop before.
        seed: Of the draws.
        device: Where the model is.

    Returns:
        The new tokens alone.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one token, got none")
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(config.num_tokens):
        seen = tokens[-model.sequence_length :]
        padding = [0] * (model.sequence_length - len(seen))
        logits = model(torch.tensor([seen + padding], device=device))[0, len(seen) - 1]
        token = _choose(logits.float().cpu(), config.temperature, generator)
        if token == stop_at:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
