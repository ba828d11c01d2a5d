"""How a model is spread over a slice, or several: the degrees of parallelism that fit.

Pure: of topologies and counts alone, so that a pod is planned where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.system import System

BYTES_OF_STATE = 16
"""A parameter's: its value, its gradient and AdamW's two moments, in float32."""

_FOR_STATE = 0.6  # of a device's memory; the rest is for activations and gathered weights
_MOST_EXPERT_GROUPS = 64  # DeepSeek-V3, arXiv:2412.19437, section 3.2: experts over 64 devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What of a model its parallelism depends on.

    Attributes:
        name: for messages.
        num_parameters: in all.
        num_kv_heads: what tensor parallelism must divide.
        sequence_length: tokens.
        max_batch_tokens: the most tokens a step of the whole job may take and still learn from all.
        num_experts: of a mixture; 0 for a dense model.
    """

    name: str
    num_parameters: int
    num_kv_heads: int
    sequence_length: int
    max_batch_tokens: int
    num_experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many devices each kind of parallelism takes; replicate x shard x tensor is all of them.

    Attributes:
        replicate: groups that each hold the whole model, joined over DCN (HSDP).
        shard: devices that its parameters are sharded over (FSDP).
        tensor: devices that share a layer's products; the innermost axis.
        expert: devices that experts are spread over; taken from the shard and tensor axes.
    """

    replicate: int
    shard: int
    tensor: int
    expert: int

    def mesh(self) -> dict[str, int]:
        """Axes by name, the outermost first, as `tpu-launch plan --mesh` takes them."""
        sizes = {"dp_replicate": self.replicate, "fsdp": self.shard, "tp": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1}


def choose_degrees(topology: System, model: ModelSize) -> Degrees:
    """Return the degrees for a model on a topology, one sequence a data-parallel group.

    FSDP over a slice, replicated over slices where one can hold the model: then only gradients
    cross DCN. Tensor parallelism only where there are more devices than a step has sequences.

    Raises:
        TopologyError: the model does not fit there; says how many devices it takes.

    Example:
        >>> size = ModelSize(name="8B", num_parameters=8_030_261_248, num_kv_heads=8,
        ...                  sequence_length=8192, max_batch_tokens=4 * 2**20)
        >>> choose_degrees(System.parse("v5p:4x4x4*2"), size).mesh()
        {'dp_replicate': 2, 'fsdp': 64}
    """
    generation = topology.slice.generation
    state = model.num_parameters * BYTES_OF_STATE
    room = _FOR_STATE * generation.hbm_bytes / generation.devices_per_chip
    in_slice = topology.slice.num_devices
    replicate = topology.num_slices if state <= room * in_slice else 1
    holding = topology.num_devices // replicate
    if state > room * holding:
        raise TopologyError(
            f"{model.name} has {state / 2**30:,.0f} GiB of weights, gradients and optimizer state, "
            f"and {topology} has room for {room * holding / 2**30:,.0f} GiB of them on {holding} "
            f"devices. Take at least {-(-state // int(room)):,} devices of {generation}."
        )
    groups = max(1, model.max_batch_tokens // model.sequence_length)
    tensor = 1
    while topology.num_devices // tensor > groups:
        tensor *= 2
        if model.num_kv_heads % tensor or holding % tensor:
            raise TopologyError(
                f"{topology} has {topology.num_devices} devices, and {model.name} has work for "
                f"{groups * tensor // 2}: {groups} sequences of {model.sequence_length} tokens a "
                f"step, {model.num_kv_heads} heads of keys. Take a smaller slice, or set the "
                f"degrees and the batch yourself."
            )
    expert = 1
    while (
        2 * expert <= min(_MOST_EXPERT_GROUPS, in_slice)
        and model.num_experts % (2 * expert) == 0
        and holding % (2 * expert) == 0
        and model.num_experts
    ):
        expert *= 2
    return Degrees(replicate=replicate, shard=holding // tensor, tensor=tensor, expert=expert)
