"""What can go wrong in a recipe beyond a caller's mistake, which is a ValueError."""

from __future__ import annotations

from tpu_dist.errors import TpuDistError


class RecipeError(TpuDistError):
    """A recipe cannot go on; the message says what was asked, what was found, what to do."""


class MissingDependencyError(RecipeError):
    """A package that only the recipes need is not installed."""

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed. "
            f'Run `pip install "tpu-dist[recipes]"`.'
        )


class RunDirectoryError(RecipeError):
    """The run directory cannot be used, or holds something other than what was asked for."""


class NonFiniteLossError(RecipeError):
    """Training diverged: a loss or gradient norm is nan or infinite."""

    def __init__(self, *, step: int, loss: float, gradient_norm: float) -> None:
        super().__init__(
            f"step {step} has loss {loss} and gradient norm {gradient_norm}; training stopped. "
            f"Start again with a lower --learning-rate, or look at what step {step} was fed. "
            f"Checkpoints hold earlier steps only."
        )
        self.step = step
