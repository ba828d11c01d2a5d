"""A small decoder-only language model: RMSNorm, rotary positions, SwiGLU, causal attention.

Plain PyTorch with real arithmetic and static shapes only, so that the same modules run eagerly,
sharded by FSDP2, and on a compiling device. Parameters are made on any device, meta included, and
get their values from :meth:`DecoderLM.reset_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

_INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model; the vocabulary comes from the tokenizer.

    Attributes:
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Attention heads; each is ``dim / num_heads`` wide, which must be even.
        hidden_dim: Width inside the SwiGLU.
        tied_head: Whether the output head is the embedding's transpose.
        rope_base: Base of the rotary frequencies.
    """

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 3
    hidden_dim: int = 512
    tied_head: bool = True
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "hidden_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim must be an even multiple of num_heads (rotary positions turn pairs), "
                f"got dim {self.dim} and num_heads {self.num_heads}"
            )
        if self.rope_base <= 1:
            raise ValueError(f"rope_base must be above 1, got {self.rope_base}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads


class DecoderLM(nn.Module):
    """Token ids in, logits over the next token out.

    Example:
        >>> model = DecoderLM(ModelConfig(), vocabulary_size=2048, sequence_length=128)
        >>> model.reset_parameters(torch.Generator().manual_seed(0))
        >>> model(torch.zeros(1, 128, dtype=torch.int64)).shape
        torch.Size([1, 128, 2048])
    """

    rotations: Tensor

    def __init__(self, config: ModelConfig, *, vocabulary_size: int, sequence_length: int) -> None:
        super().__init__()
        self.config = config
        self.sequence_length = sequence_length
        self.embedding = nn.Embedding(vocabulary_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = None if config.tied_head else nn.Linear(config.dim, vocabulary_size, bias=False)
        self.register_buffer(
            "rotations", torch.empty(2, sequence_length, config.head_dim // 2), persistent=False
        )

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Give every parameter and buffer its first value, in place.

        The values depend on the generator's seed alone: not on the device, the number of
        processes, or how the parameters are sharded. Each is drawn whole on the host, then this
        process keeps its shard; nothing is communicated.

        Args:
            generator: A CPU generator, at the same state on every process.
        """
        self.rotations.copy_(
            rotation_table(self.sequence_length, self.config.head_dim, base=self.config.rope_base)
        )
        _fill_normal(self.embedding.weight, std=_INIT_STD, generator=generator)
        for block in self.decoder_blocks():
            block.reset_parameters(generator)
        self.norm.reset_parameters()
        if self.head is not None:
            _fill_normal(self.head.weight, std=_INIT_STD, generator=generator)

    def decoder_blocks(self) -> Iterator[Block]:
        """The blocks, first to last: the units that FSDP shards."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next token at each position.

        Args:
            tokens: Ids, ``[batch, length]`` with ``length <= sequence_length``.

        Returns:
            Logits, ``[batch, length, vocabulary]``; position i sees tokens 0..i only.
        """
        length = tokens.shape[1]
        if length > self.sequence_length:
            raise ValueError(
                f"the model was built for {self.sequence_length} positions, got {length} tokens"
            )
        hidden = self.embedding(tokens)
        rotations = self.rotations[:, :length]
        for block in self.blocks:
            hidden = block(hidden, rotations)
        hidden = self.norm(hidden)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(hidden, weight)


class Block(nn.Module):
    """One pre-norm residual block: attention, then SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = SwiGLU(config)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Give the block its first values; see :meth:`DecoderLM.reset_parameters`."""
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters(generator)
        self.mlp_norm.reset_parameters()
        self.mlp.reset_parameters(generator)

    def forward(self, hidden: Tensor, rotations: Tensor) -> Tensor:
        """Add what attention and the SwiGLU find; ``[batch, length, dim]`` in and out."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotations)
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.output_std = _output_std(config)
        self.query_key_value = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Give the weights their first values; see :meth:`DecoderLM.reset_parameters`."""
        _fill_normal(self.query_key_value.weight, std=_INIT_STD, generator=generator)
        _fill_normal(self.output.weight, std=self.output_std, generator=generator)

    def forward(self, hidden: Tensor, rotations: Tensor) -> Tensor:
        """Attend to this and earlier positions; ``[batch, length, dim]`` in and out."""
        batch, length, dim = hidden.shape
        projected = self.query_key_value(hidden)
        by_head = projected.view(batch, length, 3, self.num_heads, self.head_dim)
        query, key, value = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(
            rotate(query, rotations), rotate(key, rotations), value, is_causal=True
        )
        output: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, dim))
        return output


class SwiGLU(nn.Module):
    """The gated feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.output_std = _output_std(config)
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Give the weights their first values; see :meth:`DecoderLM.reset_parameters`."""
        _fill_normal(self.gate_up.weight, std=_INIT_STD, generator=generator)
        _fill_normal(self.down.weight, std=self.output_std, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position alone; ``[batch, length, dim]`` in and out."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output


def rotation_table(length: int, head_dim: int, *, base: float) -> Tensor:
    """Cosines and sines of the rotary angles (Su et al., 2021), ``[2, length, head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), base**-exponents)
    return torch.stack((angles.cos(), angles.sin())).to(torch.float32)


def rotate(heads: Tensor, rotations: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) by its position's angle.

    Args:
        heads: ``[batch, heads, length, head_dim]``.
        rotations: The first ``length`` rows of :func:`rotation_table`.

    Returns:
        As ``heads``, in its dtype; the turn itself is done in float32.
    """
    cosines, sines = rotations.unbind(0)
    left, right = heads.to(rotations.dtype).chunk(2, dim=-1)
    turned = torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)
    return turned.to(heads.dtype)


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, whatever the sharding."""
    return sum(parameter.numel() for parameter in model.parameters())


def _output_std(config: ModelConfig) -> float:
    """Of layers that add to the residual stream, so that its variance does not grow with depth."""
    return _INIT_STD / math.sqrt(2 * config.num_layers)


def _fill_normal(parameter: Tensor, *, std: float, generator: torch.Generator) -> None:
    whole = torch.empty(parameter.shape).normal_(std=std, generator=generator)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every process holds the same whole, so each cuts out its own shard.
        whole = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(whole)
