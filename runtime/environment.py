"""The environment variables the process group knows, read here and nowhere else.

==========================  =====================================================================
``TPU_DIST_PLATFORM``       ``tpu`` or ``cpu``: the JAX platform; default: tpu where chips are
``TPU_DIST_HOST``           where other processes reach this one; default: from the store
``TPU_DIST_TOPOLOGY``       the slices of the job, as in ``tpu7x:4x4x8*2``; on the CPU stand-in the
                            ranks stand for their devices; default: what the TPUs say
``TPU_DIST_PREFER``         ``1``: take the names that torch_tpu has too (read in _autoload)
``TPU_DIST_BLOCKING_WAIT``  ``1``: wait() on device tensors blocks the host until they are there
``TPU_DIST_FALLBACK``       ``error``: refuse operators that would run on the CPU; default: ``warn``
``TPU_LAUNCH_BLOCKING``     ``1``: Debug mode, each operator is waited for; also
                            ``TORCH_TPU_LAUNCH_BLOCKING``
``LOCAL_RANK``              index of this process on its host (torchrun, tpu-launch)
``LOCAL_WORLD_SIZE``        number of processes on this host (torchrun, tpu-launch)
``WORLD_SIZE``              number of processes (torchrun, tpu-launch)
``MASTER_ADDR``             host of the c10d store (torchrun, tpu-launch)
``TPU_DIST_CACHE_DIR``      where results of compiles are kept; default: ``tpu_dist`` in the next
``XDG_CACHE_HOME``          where a user's caches are; default: ``~/.cache``
``MALLOC_*``,               glibc's own: where the user has set its thresholds, they are left alone
``GLIBC_TUNABLES``
==========================  =====================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PLATFORMS = ("cpu", "tpu")
_MALLOC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
FALLBACKS = ("warn", "error")

_BLOCKING = ("TPU_LAUNCH_BLOCKING", "TORCH_TPU_LAUNCH_BLOCKING")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What the environment says about this process; None where it says nothing."""

    platform: str | None = None
    host: str | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_address: str | None = None
    tuned_malloc: bool = False
    world_size: int | None = None
    fallback: str = "warn"
    launch_blocking: bool = False
    blocking_wait: bool = False
    topology: str | None = None

    def __post_init__(self) -> None:
        if self.platform is not None and self.platform not in PLATFORMS:
            raise ValueError(
                f"TPU_DIST_PLATFORM must be one of {', '.join(PLATFORMS)}, got {self.platform!r}"
            )
        if self.fallback not in FALLBACKS:
            raise ValueError(
                f"TPU_DIST_FALLBACK must be one of {', '.join(FALLBACKS)}, got {self.fallback!r}"
            )
        size = self.local_world_size
        if size is not None and size < 1:
            raise ValueError(f"LOCAL_WORLD_SIZE must be at least 1, got {size}")
        if self.local_rank is not None and not 0 <= self.local_rank < (size or sys.maxsize):
            raise ValueError(
                f"LOCAL_RANK must be one of the host's processes, got {self.local_rank} with "
                f"LOCAL_WORLD_SIZE {size}"
            )


def read_environment(environ: Mapping[str, str] = os.environ) -> RuntimeConfig:
    """Read the variables of the table above; raises ValueError for one that makes no sense."""
    return RuntimeConfig(
        platform=environ.get("TPU_DIST_PLATFORM", "").lower() or None,
        host=environ.get("TPU_DIST_HOST") or None,
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE"),
        master_address=environ.get("MASTER_ADDR") or None,
        tuned_malloc=any(name in environ for name in _MALLOC),
        world_size=_integer(environ, "WORLD_SIZE"),
        fallback=environ.get("TPU_DIST_FALLBACK", "").lower() or "warn",
        launch_blocking=any(_is_on(environ, name) for name in _BLOCKING),
        blocking_wait=_is_on(environ, "TPU_DIST_BLOCKING_WAIT"),
        topology=environ.get("TPU_DIST_TOPOLOGY") or None,
    )


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") not in ("", "0")


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where this user's caches are kept; it need not exist."""
    own = environ.get("TPU_DIST_CACHE_DIR")
    if own:
        return Path(own)
    home = Path(environ.get("XDG_CACHE_HOME") or "")  # relative ones are void, says its standard
    if not home.is_absolute():
        home = Path(environ.get("HOME") or "/tmp") / ".cache"
    return home / "tpu_dist"


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None
