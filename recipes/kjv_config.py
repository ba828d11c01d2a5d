"""What one run of the King James recipe is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch

from tpu_dist.recipes.model import ModelConfig
from tpu_dist.recipes.run_directory import Setting
from tpu_dist.recipes.sample import SampleConfig
from tpu_dist.recipes.sharding import PrecisionConfig
from tpu_dist.recipes.tokenizer import TokenizerConfig
from tpu_dist.recipes.train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KjvConfig:
    """One run: where it runs, what it trains, what it leaves behind.

    Attributes:
        backend: Name of the process group's backend.
        device: Type of device that holds the tensors.
        timeout: For any one wait for other processes.
        seed: Of the weights, the order of the data, and the sample.
        held_out_every: One chapter in so many is for validation.
        tokenizer: The vocabulary.
        model: Its shape.
        precision: Its dtypes.
        train: Steps, batches, optimizer and checkpoints.
        sample: What it writes at the end.
        run_dir: The run's directory; None is a new ``runs/kjv-NNNN``, or to resume, the newest.
        resume: Go on from the newest whole checkpoint.
        json_file: For a JSON object a logged step.
    """

    backend: str = "tpu_dist"
    device: str = "tpu"
    timeout: timedelta = timedelta(minutes=5)
    seed: int = 1611
    held_out_every: int = 20
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    sample: SampleConfig = SampleConfig()
    run_dir: Path | None = None
    resume: bool = False
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if self.timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, got {self.timeout}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.held_out_every < 2:
            raise ValueError(f"held_out_every must be at least 2, got {self.held_out_every}")
        if not self.sample.prompt and self.sample.num_tokens:
            raise ValueError("prompt must not be empty; ask for 0 sample_tokens for no sample")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"device {self.device!r} is not known to torch: {error}") from error
        if self.backend == "gloo" and torch.device(self.device).type == "tpu":
            raise ValueError("gloo carries no tensors that are on 'tpu'; add --device cpu")

    def settings(self) -> Mapping[str, Setting]:
        """All that decides the weights a run ends with, by option name; no process count is."""
        return {
            "seed": self.seed,
            "held_out_every": self.held_out_every,
            "num_steps": self.train.num_steps,
            **asdict(self.tokenizer),
            **asdict(self.model),
            **asdict(self.precision),
            **asdict(self.train.batch),
            **asdict(self.train.optimizer),
        }
