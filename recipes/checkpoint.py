"""Sharded checkpoints that are there whole or not at all.

A checkpoint is written as ``step-00000100.partial`` by all processes, then renamed to
``step-00000100`` by rank 0 once every process has written its part. What still bears another
name is never resumed from, and is removed at the next start.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from tpu_dist.recipes.errors import RunDirectoryError
from tpu_dist.recipes.files import sync_directory

_log = logging.getLogger(__name__)

_WHOLE = re.compile(r"step-(\d{8,})")
_PARTIAL_SUFFIX = ".partial"
# Written last by torch.distributed.checkpoint, by rank 0.
_METADATA = ".metadata"


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """All that a run needs to go on: the objects, and how far they are.

    Attributes:
        model: Its parameters, sharded or not.
        optimizer: Of those parameters.
        step: Optimizer steps done.
        position: Training windows consumed by all processes together.
    """

    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how much to keep.

    Attributes:
        save_every: Steps between saves; 0 saves only at the end.
        keep_last: Whole checkpoints to keep.
    """

    save_every: int = 100
    keep_last: int = 2

    def __post_init__(self) -> None:
        if self.save_every < 0:
            raise ValueError(f"save_every must not be negative, got {self.save_every}")
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {self.keep_last}")

    def is_due(self, step: int, *, num_steps: int) -> bool:
        """Whether to save after a step; always after the last."""
        return step == num_steps or (self.save_every > 0 and step % self.save_every == 0)


class Checkpoints:
    """The checkpoints of one run: save, find, resume, and drop the oldest.

    Args:
        directory: On a file system that all processes share; must exist.
        rank: This process.
        keep_last: Whole checkpoints to keep.

    Example:
        >>> checkpoints = Checkpoints(Path("runs/kjv-0001/checkpoints"), rank=0, keep_last=2)
        >>> checkpoints.save(state)
        >>> checkpoints.load(state, step=checkpoints.steps()[-1])
    """

    def __init__(self, directory: Path, *, rank: int, keep_last: int) -> None:
        self._directory = directory
        self._rank = rank
        self._keep_last = keep_last

    def steps(self) -> tuple[int, ...]:
        """Steps that have a whole checkpoint, oldest first."""
        return whole_checkpoints(self._directory)

    def save(self, state: TrainingState) -> Path:
        """Write and publish a checkpoint. Collective; blocks until this process's part is durable.

        Returns:
            Where it is, or on other ranks than 0 will be in a moment.

        Raises:
            RunDirectoryError: It could not be written.
        """
        published = self._path(state.step)
        partial = published.with_name(published.name + _PARTIAL_SUFFIX)
        try:
            save(_as_dict(state), checkpoint_id=partial)
            if self._rank == 0:
                self._publish(partial, published)
                self._drop_oldest()
        except (OSError, CheckpointException) as error:
            raise RunDirectoryError(
                f"the checkpoint of step {state.step} could not be written to {partial}: "
                f"{_reason(error)}. Earlier checkpoints are untouched; make room or permit "
                f"writing there, then run again with --resume."
            ) from error
        return published

    def load(self, state: TrainingState, *, step: int) -> None:
        """Overwrite the state in place with the checkpoint of a step. Collective.

        The number of processes may differ from that of the run that saved.

        Raises:
            RunDirectoryError: The checkpoint does not fit the model, or cannot be read.
        """
        content = _as_dict(state)
        path = self._path(step)
        try:
            load(content, checkpoint_id=path)
        except (OSError, CheckpointException) as error:
            raise RunDirectoryError(
                f"the checkpoint {path} could not be read: {_reason(error)}. To fall back on an "
                f"earlier one, remove it; {list(self.steps())} are there."
            ) from error
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )
        state.step = content["progress"]["step"]
        state.position = content["progress"]["position"]

    def remove_unfinished(self) -> None:
        """Remove what interrupted saves and removals left. Rank 0 alone, before any save.

        Raises:
            RunDirectoryError: It could not be removed.
        """
        for path in self._directory.glob(f"*{_PARTIAL_SUFFIX}"):
            _log.warning("removing %s, left by an interrupted run", path)
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise RunDirectoryError(
                    f"{path}, left by an interrupted run, could not be removed: {error}. Remove "
                    f"it, then run again."
                ) from error

    def _publish(self, partial: Path, published: Path) -> None:
        if published.exists():
            self._remove(published)
        sync_directory(partial)
        partial.rename(published)
        sync_directory(self._directory)

    def _drop_oldest(self) -> None:
        for step in self.steps()[: -self._keep_last]:
            self._remove(self._path(step))

    def _remove(self, path: Path) -> None:
        # Renamed first: half of a removed checkpoint must not look whole.
        doomed = path.with_name(f"{path.name}.removed{_PARTIAL_SUFFIX}")
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"


def whole_checkpoints(directory: Path) -> tuple[int, ...]:
    """Steps with a published checkpoint in a directory, oldest first; none if it is missing."""
    if not directory.is_dir():
        return ()
    return tuple(
        sorted(
            int(match[1])
            for path in directory.iterdir()
            if (match := _WHOLE.fullmatch(path.name)) and (path / _METADATA).is_file()
        )
    )


def _as_dict(state: TrainingState) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    progress: Mapping[str, int] = {"step": state.step, "position": state.position}
    return {"model": model, "optimizer": optimizer, "progress": dict(progress)}


def _reason(error: BaseException) -> str:
    """One line of an error; of a CheckpointException, which holds one a rank, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(error)
