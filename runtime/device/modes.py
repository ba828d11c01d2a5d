"""How operators are run: eager modes, and the precision of matrix products."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tpu_dist.runtime.environment import read_environment
from tpu_dist.topology.errors import UnsupportedError


class EagerMode(enum.Enum):
    """When an operator that was called is run."""

    DEFER_NEVER = "strict"
    """Strict, the default: each operator is dispatched at once, and runs asynchronously."""
    DEFER_NEVER_AND_LAUNCH_BLOCKING = "debug"
    """Debug: as Strict, and the host waits for each operator: errors are raised where they are."""
    DEFER_AND_FUSE = "fused"
    """Record operators and run them fused. Not there yet."""


class Precision(enum.Enum):
    """In how many bfloat16 passes a TPU multiplies float32 matrices."""

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"


# torch.set_float32_matmul_precision's words for them.
_OF_TORCH: Mapping[str, Precision] = {
    "medium": Precision.DEFAULT,
    "high": Precision.HIGH,
    "highest": Precision.HIGHEST,
}


@dataclass(slots=True)
class _Modes:
    """What is chosen in this process; read from the environment when the device is first used."""

    eager: EagerMode
    blocking: bool


_modes: _Modes | None = None
_scope = threading.local()


def _current() -> _Modes:
    global _modes
    if _modes is None:
        blocking = read_environment().launch_blocking
        mode = EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING if blocking else EagerMode.DEFER_NEVER
        _modes = _Modes(mode, blocking)
    return _modes


def eager_mode() -> EagerMode:
    """The eager mode of this process."""
    return _current().eager


def set_eager_mode(mode: EagerMode) -> None:
    """Choose the eager mode; for all threads, from the next operator on.

    Raises:
        UnsupportedError: DEFER_AND_FUSE, which does not exist yet.
    """
    if not isinstance(mode, EagerMode):
        raise ValueError(f"an eager mode must be one of {list(EagerMode)}, got {mode!r}")
    if mode is EagerMode.DEFER_AND_FUSE:
        raise UnsupportedError(
            "EagerMode.DEFER_AND_FUSE is not there yet; DEFER_NEVER (Strict) and "
            "DEFER_NEVER_AND_LAUNCH_BLOCKING (Debug) are."
        )
    modes = _current()
    modes.eager = mode
    modes.blocking = mode is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


def is_blocking() -> bool:
    """Whether the host waits for each operator."""
    return _current().blocking


def matmul_precision() -> Precision:
    """The precision of float32 matrix products: of the innermost precision(), else torch's."""
    scoped: list[Precision] | None = getattr(_scope, "stack", None)
    return scoped[-1] if scoped else _OF_TORCH[torch.get_float32_matmul_precision()]


def precision_key() -> object:
    """What tells matmul_precision() apart, for less time than it takes."""
    scoped: list[Precision] | None = getattr(_scope, "stack", None)
    if scoped:
        return scoped[-1].value
    return torch._C._get_float32_matmul_precision()


@contextlib.contextmanager
def precision(wanted: Precision | str) -> Iterator[None]:
    """Multiply float32 matrices in this precision, in this thread, for the length of the block."""
    chosen = wanted if isinstance(wanted, Precision) else Precision(wanted.lower())
    if not hasattr(_scope, "stack"):
        _scope.stack = []
    _scope.stack.append(chosen)
    try:
        yield
    finally:
        _scope.stack.pop()
