"""The configurations: functions that return torchtitan's JobConfig, by the slice it is to run on.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

from torchtitan.config import JobConfig

from tpu_dist.recipes.titan.king_james import ASSETS, TRAINING, VALIDATION
from tpu_dist.recipes.titan.pods import ModelSize, choose_degrees
from tpu_dist.recipes.titan.specs import spec_name
from tpu_dist.topology.system import System

# Tokens a step: Llama 3 ended at 16 Mi (arXiv:2407.21783, section 3.4.1), and started at 4 Mi;
# DeepSeek-V3 took 15,360 sequences of 4,096 (arXiv:2412.19437, section 4.2).
_MI = 2**20


def llama3_debug(topology: System | None = None) -> JobConfig:
    """Llama 3, 6 layers of 256."""
    return _debug("llama3", "debugmodel")


def qwen3_debug(topology: System | None = None) -> JobConfig:
    """Qwen 3, dense, 8 layers of 256: with normalised queries and keys."""
    return _debug("qwen3", "debugmodel")


def qwen3_moe_debug(topology: System | None = None) -> JobConfig:
    """Qwen 3, a mixture of 64 experts of which each token takes 8; 8 layers of 256."""
    return _debug("qwen3", "debugmodel_moe")


def deepseek_v3_debug(topology: System | None = None) -> JobConfig:
    """DeepSeek V3: latent attention, a mixture of 8 experts with shared ones; 6 layers of 256."""
    return _debug("deepseek_v3", "debugmodel")


def llama3_8b(topology: System | None = None) -> JobConfig:
    """Llama 3.1 8B."""
    size = ModelSize(
        name="Llama 3.1 8B",
        num_parameters=8_030_261_248,
        num_kv_heads=8,
        sequence_length=8192,
        max_batch_tokens=4 * _MI,
    )
    return _large("llama3", "8B", size, topology, assets="Llama-3.1-8B", learning_rate=3e-4)


def llama3_70b(topology: System | None = None) -> JobConfig:
    """Llama 3.1 70B."""
    size = ModelSize(
        name="Llama 3.1 70B",
        num_parameters=70_553_706_496,
        num_kv_heads=8,
        sequence_length=8192,
        max_batch_tokens=16 * _MI,
    )
    return _large("llama3", "70B", size, topology, assets="Llama-3.1-70B", learning_rate=1.5e-4)


def llama3_405b(topology: System | None = None) -> JobConfig:
    """Llama 3.1 405B."""
    size = ModelSize(
        name="Llama 3.1 405B",
        num_parameters=405_853_388_800,
        num_kv_heads=8,
        sequence_length=8192,
        max_batch_tokens=16 * _MI,
    )
    return _large("llama3", "405B", size, topology, assets="Llama-3.1-405B", learning_rate=8e-5)


def qwen3_32b(topology: System | None = None) -> JobConfig:
    """Qwen 3 32B, dense."""
    size = ModelSize(
        name="Qwen3 32B",
        num_parameters=32_762_123_264,
        num_kv_heads=8,
        sequence_length=4096,
        max_batch_tokens=16 * _MI,
    )
    return _large("qwen3", "32B", size, topology, assets="Qwen3-32B", learning_rate=3e-4)


def qwen3_30b_a3b(topology: System | None = None) -> JobConfig:
    """Qwen 3 30B, a mixture of 128 experts; 3B are active."""
    size = ModelSize(
        name="Qwen3 30B-A3B",
        num_parameters=30_532_122_624,
        num_kv_heads=4,
        sequence_length=4096,
        max_batch_tokens=16 * _MI,
        num_experts=128,
    )
    return _large("qwen3", "30B-A3B", size, topology, assets="Qwen3-30B-A3B", learning_rate=3e-4)


def qwen3_235b_a22b(topology: System | None = None) -> JobConfig:
    """Qwen 3 235B, a mixture of 128 experts; 22B are active."""
    size = ModelSize(
        name="Qwen3 235B-A22B",
        num_parameters=235_093_634_560,
        num_kv_heads=4,
        sequence_length=4096,
        max_batch_tokens=16 * _MI,
        num_experts=128,
    )
    return _large(
        "qwen3", "235B-A22B", size, topology, assets="Qwen3-235B-A22B", learning_rate=3e-4
    )


def deepseek_v3_671b(topology: System | None = None) -> JobConfig:
    """DeepSeek V3, 671B, a mixture of 256 experts; 37B are active."""
    size = ModelSize(
        name="DeepSeek-V3",
        num_parameters=671_026_404_352,
        num_kv_heads=128,
        sequence_length=4096,
        max_batch_tokens=60 * _MI,
        num_experts=256,
    )
    return _large(
        "deepseek_v3", "671B", size, topology, assets="DeepSeek-V3-Base", learning_rate=2.2e-4
    )


def _debug(model: str, flavor: str) -> JobConfig:
    config = JobConfig()
    config.job.description = f"{model} {flavor}"
    config.model.name = spec_name(model)
    config.model.flavor = flavor
    config.model.hf_assets_path = ASSETS
    config.optimizer.lr = 8e-4
    config.lr_scheduler.warmup_steps = 2
    config.lr_scheduler.decay_ratio = 0.8
    config.training.dataset = TRAINING
    config.training.local_batch_size = 4
    config.training.seq_len = 256
    config.training.steps = 50
    config.validation.dataset = VALIDATION
    config.validation.local_batch_size = 4
    config.validation.seq_len = 256
    config.validation.steps = 2
    config.metrics.log_freq = 1
    config.metrics.disable_color_printing = True
    config.debug.seed = 1611
    return config


def _large(
    model: str,
    flavor: str,
    size: ModelSize,
    topology: System | None,
    *,
    assets: str,
    learning_rate: float,
) -> JobConfig:
    """A published model; without a topology it is sharded over all ranks."""
    config = JobConfig()
    config.job.description = size.name
    config.model.name = spec_name(model)
    config.model.flavor = flavor
    config.model.hf_assets_path = f"./assets/hf/{assets}"
    config.optimizer.lr = learning_rate
    config.lr_scheduler.warmup_steps = 600
    config.training.dataset = "c4"
    config.training.local_batch_size = 1
    config.training.seq_len = size.sequence_length
    config.training.steps = 3000
    config.activation_checkpoint.mode = "full"
    config.checkpoint.interval = 500
    config.comm.init_timeout_seconds = 1800  # compiling the first step
    if topology is not None:
        degrees = choose_degrees(topology, size)
        config.parallelism.data_parallel_replicate_degree = degrees.replicate
        config.parallelism.data_parallel_shard_degree = degrees.shard
        config.parallelism.tensor_parallel_degree = degrees.tensor
        config.parallelism.expert_parallel_degree = degrees.expert
    return config
