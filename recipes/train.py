"""The training loop: steps, log lines and checkpoints, until the last step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tpu_dist.recipes.checkpoint import CheckpointConfig, Checkpoints, TrainingState
from tpu_dist.recipes.data import BatchConfig, StepBatch, TrainingBatches
from tpu_dist.recipes.errors import NonFiniteLossError
from tpu_dist.recipes.evaluate import summed_loss
from tpu_dist.recipes.progress import Progress, StepReport
from tpu_dist.recipes.schedule import OptimizerConfig, learning_rate_at
from tpu_dist.recipes.sharding import clip_gradients
from tpu_dist.recipes.verbs import VerbClock, VerbLap


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train, and what to do along the way.

    Attributes:
        num_steps: Optimizer steps.
        log_every: Steps between progress lines; the first and last steps always have one.
        batch: What a step is fed.
        optimizer: How it updates.
        checkpoint: When to save.
    """

    num_steps: int = 200
    log_every: int = 10
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        for name in ("num_steps", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def logs(self, step: int) -> bool:
        """Whether a step has a progress line."""
        return step in (1, self.num_steps) or step % self.log_every == 0


def train(
    config: TrainConfig,
    state: TrainingState,
    batches: TrainingBatches,
    *,
    checkpoints: Checkpoints,
    progress: Progress,
    device: torch.device,
) -> None:
    """Take a run from where its state is to its last step. Collective over the default group.

    The host waits for the device only at a log line or checkpoint; there, every step since the
    last one is checked, so nothing that has diverged is ever saved.

    Args:
        config: The whole run's.
        state: Changed in place.
        batches: At the state's position.
        checkpoints: Where to save.
        progress: Where to report.
        device: Where the model is.

    Raises:
        NonFiniteLossError: On every process alike; names the first step that had one.
        RunDirectoryError: A checkpoint could not be written.
    """
    state.model.train()
    outcomes = _Outcomes()
    meter = _Meter()
    tokens_a_step = config.batch.global_batch_size * config.batch.sequence_length
    while state.step < config.num_steps:
        step = state.step + 1
        rate = learning_rate_at(step, num_steps=config.num_steps, config=config.optimizer)
        for parameters in state.optimizer.param_groups:
            parameters["lr"] = rate
        loss = _accumulate_gradients(state, batches.next_step(), device)
        norm = clip_gradients(state.model.parameters(), config.optimizer.max_gradient_norm)
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.position = step, batches.position
        outcomes.add(step, loss, norm)
        meter.count(tokens_a_step)

        saves = config.checkpoint.is_due(step, num_steps=config.num_steps)
        if not (saves or config.logs(step)):
            continue
        latest = outcomes.settle()
        if config.logs(step):
            lap = meter.lap()
            progress.step(
                StepReport(
                    step=step,
                    num_steps=config.num_steps,
                    loss=latest.loss,
                    learning_rate=rate,
                    gradient_norm=latest.gradient_norm,
                    elapsed=lap.elapsed,
                    num_steps_elapsed=lap.num_steps,
                    num_tokens_elapsed=lap.num_tokens,
                    verbs=lap.verbs,
                )
            )
        if saves:
            checkpoints.save(state)
            meter.lap()  # what saving took is no step's


def _accumulate_gradients(state: TrainingState, batch: StepBatch, device: torch.device) -> Tensor:
    """Run the passes of a step; gradients are then the mean over all processes' targets.

    Returns:
        This process's share of the step's mean loss, on the device.
    """
    model = state.model
    total = torch.zeros((), dtype=torch.float32, device=device)
    for index, one in enumerate(batch.passes):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(index == len(batch.passes) - 1)
        logits = model(one.inputs.to(device))
        loss = summed_loss(logits, one.targets.to(device)) / batch.num_targets
        # FSDP averages gradients over processes; these are shares of a mean, to be summed.
        torch.autograd.backward(loss * dist.get_world_size())
        total += loss.detach()
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    step: int
    loss: float
    gradient_norm: float


class _Outcomes:
    """Losses and norms that are still on the device, until they are needed on the host."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        self._steps.append(step)
        self._losses.append(loss)
        self._norms.append(norm)

    def settle(self) -> _Outcome:
        """Sum the losses over the processes, check all, forget all but the newest. Collective."""
        losses = torch.stack(self._losses)
        dist.all_reduce(losses)
        settled = zip(self._steps, losses.tolist(), torch.stack(self._norms).tolist(), strict=True)
        outcomes = [_Outcome(step=s, loss=loss, gradient_norm=norm) for s, loss, norm in settled]
        self._steps, self._losses, self._norms = [], [], []
        for one in outcomes:
            if not (math.isfinite(one.loss) and math.isfinite(one.gradient_norm)):
                raise NonFiniteLossError(
                    step=one.step, loss=one.loss, gradient_norm=one.gradient_norm
                )
        return outcomes[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lap:
    elapsed: timedelta
    num_steps: int
    num_tokens: int
    verbs: Mapping[str, VerbLap] | None


class _Meter:
    """Time, steps, tokens and verbs from one lap to the next."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._num_steps = 0
        self._num_tokens = 0
        self._verbs = VerbClock(dist.group.WORLD)

    def count(self, num_tokens: int) -> None:
        self._num_steps += 1
        self._num_tokens += num_tokens

    def lap(self) -> _Lap:
        now = time.perf_counter()
        lap = _Lap(
            elapsed=timedelta(seconds=now - self._started),
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            verbs=self._verbs.lap(),
        )
        self._started, self._num_steps, self._num_tokens = now, 0, 0
        return lap
