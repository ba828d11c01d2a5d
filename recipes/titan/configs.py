"""The configurations: functions that return torchtitan's JobConfig, by the slice it is to run on.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

from torchtitan.config import JobConfig

from tpu_dist.recipes.titan.king_james import ASSETS, TRAINING, VALIDATION
from tpu_dist.recipes.titan.specs import spec_name
from tpu_dist.topology.system import System


def llama3_debug(topology: System | None = None) -> JobConfig:
    """Llama 3, 6 layers of 256: seconds a step on two CPU cores."""
    return _debug("llama3", "debugmodel")


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
