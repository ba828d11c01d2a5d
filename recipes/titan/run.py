"""One process of a training, from its configuration to its end.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.tools.logging import init_logger

from tpu_dist.recipes.titan.king_james import register_datasets
from tpu_dist.recipes.titan.specs import register_specs
from tpu_dist.recipes.titan.trainer import DeviceTrainer


def run(config: JobConfig, *, topology: str | None = None) -> None:
    """Train; or, with checkpoint.create_seed_checkpoint, save the first weights.

    The process group is left alone if that raises: peers may be gone, and the launcher is waiting
    for this process to end.

    Args:
        config: what to train.
        topology: see `DeviceTrainer`.
    """
    init_logger()
    register_datasets()
    register_specs()
    trainer = DeviceTrainer(config, topology=topology)
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()
