"""This process among the others: what the launcher says, and the process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_RANK = "RANK"
_WORLD_SIZE = "WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Which process this is, of how many."""

    rank: int
    size: int

    @staticmethod
    def from_environment() -> World:
        """As tpu-launch and torchrun say, in RANK and WORLD_SIZE.

        Raises:
            ValueError: No launcher has said so.
        """
        rank, size = os.environ.get(_RANK), os.environ.get(_WORLD_SIZE)
        if rank is None or size is None:
            missing = " and ".join(n for n in (_RANK, _WORLD_SIZE) if n not in os.environ)
            raise ValueError(
                f"a launcher must start this program, but {missing} is not set. Run `tpu-launch "
                f"--nproc-per-node 2 -m tpu_dist.recipes.kjv`, or the same with torchrun."
            )
        return World(rank=int(rank), size=int(size))


@contextmanager
def process_group(backend: str, timeout: timedelta) -> Iterator[None]:
    """The default process group, for the length of the block.

    Left alone if the block raises: the peers may be gone, and the launcher is waiting for this
    process to end.
    """
    dist.init_process_group(backend, timeout=timeout)
    yield
    dist.destroy_process_group()
