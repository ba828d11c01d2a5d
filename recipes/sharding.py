"""FSDP2 on a model: each block a unit, the rest with the root; and how to read its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tpu_dist.recipes.model import DecoderLM

_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of the parts of a step; parameters and optimizer state are always float32.

    Attributes:
        compute_dtype: Of parameters as gathered, and of activations.
        reduce_dtype: Of gradients as reduced.
    """

    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name} must be one of {', '.join(_DTYPES)}, got {getattr(self, name)}"
                )

    def policy(self) -> MixedPrecisionPolicy:
        """The same for FSDP2; logits stay in the compute dtype, the loss is float32."""
        return MixedPrecisionPolicy(
            param_dtype=_DTYPES[self.compute_dtype], reduce_dtype=_DTYPES[self.reduce_dtype]
        )


def shard(model: DecoderLM, mesh: DeviceMesh, precision: PrecisionConfig) -> None:
    """Shard a model over a one-axis mesh, in place; its parameters may be on meta. No traffic."""
    policy = precision.policy()
    for block in model.decoder_blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a norm over all of them, sharded or not. Collective.

    As ``clip_grad_norm_``, but with the norm summed over the shards once and used twice: for
    scaling, and for the caller to report. Does not block the host on a device.

    Returns:
        The norm before scaling, a plain scalar tensor, equal on every process.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm
