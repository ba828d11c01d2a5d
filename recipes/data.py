"""Token windows, shuffled, sharded and resumable: what each process trains on at each step.

The order is a function of the seed and the position alone. The position is one integer, the number
of windows that all processes together have consumed, so a run can resume anywhere, on any number
of processes, and every window is used exactly once an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_TARGET = -100
"""Target of a position that has none; cross_entropy's default ignore_index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How the windows are handed out.

    Attributes:
        sequence_length: Tokens in a window.
        global_batch_size: Windows in an optimizer step, over all processes.
        accumulation_steps: Forward-backward passes in an optimizer step.
    """

    sequence_length: int = 128
    global_batch_size: int = 8
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, got {self.sequence_length}")

    def windows_a_pass(self, world_size: int) -> int:
        """Windows that one process takes in one forward-backward pass.

        Raises:
            ValueError: The batch does not divide among the processes and passes.
        """
        shares = world_size * self.accumulation_steps
        if self.global_batch_size % shares:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} does not divide among {world_size} "
                f"processes times {self.accumulation_steps} accumulation_steps; ask for a "
                f"multiple of {shares}"
            )
        return self.global_batch_size // shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one forward pass and the token that follows each, both ``[windows, length]``."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one process needs for one optimizer step.

    Attributes:
        passes: One batch for each forward-backward pass.
        num_targets: Targets of this step over all processes and passes, to divide the summed
            loss by. Known without communication.
    """

    passes: tuple[Batch, ...]
    num_targets: int


class Windows:
    """A token stream cut into windows of equal length, one after another.

    Window i has inputs ``tokens[i*n : i*n+n]`` and targets one further, so every token but the
    first is a target exactly once. The last window is padded, with :data:`IGNORED_TARGET`.
    """

    def __init__(self, tokens: NDArray[np.int32], sequence_length: int) -> None:
        if len(tokens) < 2:
            raise ValueError(f"a token stream needs at least 2 tokens, got {len(tokens)}")
        self._tokens = tokens
        self.sequence_length = sequence_length
        self.num_targets = len(tokens) - 1

    def __len__(self) -> int:
        return -(-self.num_targets // self.sequence_length)

    def num_targets_of(self, window: int) -> int:
        """Targets of one window: its length, but for the last."""
        return min(self.sequence_length, self.num_targets - window * self.sequence_length)

    def batch(self, windows: list[int], *, size: int | None = None) -> Batch:
        """Gather windows by number into host tensors.

        Args:
            windows: Which, in order.
            size: Windows in the batch: missing ones are all padding. None: as many as given.
        """
        size = len(windows) if size is None else size
        inputs = np.zeros((size, self.sequence_length), dtype=np.int64)
        targets = np.full((size, self.sequence_length), IGNORED_TARGET, dtype=np.int64)
        for row, window in enumerate(windows):
            start, count = window * self.sequence_length, self.num_targets_of(window)
            inputs[row, :count] = self._tokens[start : start + count]
            targets[row, :count] = self._tokens[start + 1 : start + count + 1]
        return Batch(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))


class TrainingBatches:
    """Endless steps of one process's share of the windows, from any position on.

    Example:
        >>> batches = TrainingBatches(windows, BatchConfig(), seed=0, rank=0, world_size=2)
        >>> step = batches.next_step()
        >>> batches.position
        8
    """

    def __init__(
        self,
        windows: Windows,
        config: BatchConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        position: int = 0,
    ) -> None:
        self._windows = windows
        self._config = config
        self._seed = seed
        self._rank = rank
        self._windows_a_pass = config.windows_a_pass(world_size)
        self._shuffled_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.position = position

    def next_step(self) -> StepBatch:
        """This process's share of the next step; moves the position by the global batch."""
        config, size = self._config, self._windows_a_pass
        stop = self.position + config.global_batch_size
        everyone = [self._window_at(place) for place in range(self.position, stop)]
        a_pass = config.global_batch_size // config.accumulation_steps
        starts = range(self._rank * size, config.global_batch_size, a_pass)
        self.position = stop
        return StepBatch(
            passes=tuple(self._windows.batch(everyone[start : start + size]) for start in starts),
            num_targets=sum(map(self._windows.num_targets_of, everyone)),
        )

    def _window_at(self, place: int) -> int:
        epoch, index = divmod(place, len(self._windows))
        if epoch != self._shuffled_epoch:
            shuffle = np.random.default_rng((self._seed, epoch))
            self._order = shuffle.permutation(len(self._windows))
            self._shuffled_epoch = epoch
        return int(self._order[index])


def evaluation_batches(
    windows: Windows, *, batch_size: int, rank: int, world_size: int
) -> Iterator[Batch]:
    """Every window exactly once over all processes, in equally many equal batches on each.

    Sharded models communicate in forward, so processes with fewer windows get padding instead.
    """
    for start in range(0, len(windows), batch_size * world_size):
        first = start + rank * batch_size
        chosen = list(range(first, min(first + batch_size, len(windows))))
        yield windows.batch(chosen, size=batch_size)
