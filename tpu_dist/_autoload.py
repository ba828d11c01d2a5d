"""What `import torch` runs: it makes the backend's name known, and cannot raise.

torch loads every entry point of the group ``torch.backends`` at the end of its own import, and one
that raises breaks `import torch` for the whole environment: hence the broad except, and no import
of jax or of the process group here.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any

BACKEND = "tpu_dist"
PEER = "torch_tpu"  # registers the same backend and device names; only one can have them

_logger = logging.getLogger(__name__)


def register() -> None:
    """Register the c10d backend ``tpu_dist`` with torch; never raises, may be called again."""
    try:
        if _peer_has_the_name():
            return
        import torch.distributed as dist

        if dist.is_available() and not _is_ours(dist.Backend):
            dist.Backend.register_backend(
                BACKEND, _create_process_group, extended_api=True, devices=["cpu", "tpu"]
            )
        from tpu_dist.runtime.device.registration import register_device

        register_device()
    except Exception:
        _logger.exception("tpu_dist could not register its backend; the rest of torch is unharmed")


def _is_ours(backend: Any) -> bool:
    plugin = backend._plugins.get(BACKEND.upper())
    return plugin is not None and plugin.creator_fn is _create_process_group


@functools.cache  # the answer is said once
def _peer_has_the_name() -> bool:
    """Whether torch_tpu is installed beside us and we were not asked to take precedence."""
    if importlib.util.find_spec(PEER) is None or os.environ.get("TPU_DIST_PREFER") == "1":
        return False
    _logger.warning(
        "both %s and tpu_dist are installed, and both provide the backend 'tpu_dist': leaving the "
        "name to %s. Set TPU_DIST_PREFER=1 to use tpu_dist, or uninstall one of them.",
        PEER,
        PEER,
    )
    return True


def _create_process_group(options: Any, backend_options: Any = None) -> Any:
    """Create the group; c10d calls this at init_process_group and new_group (extended API)."""
    from tpu_dist._bring_up import create_process_group

    return create_process_group(options, backend_options)
