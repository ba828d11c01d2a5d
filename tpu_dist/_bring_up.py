"""From c10d's call to a process group: starts the job with the default group."""

from __future__ import annotations

import atexit
import secrets
import sys
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from tpu_dist._group_base import finish_calls
from tpu_dist._job import Job
from tpu_dist._process_group import ProcessGroup
from tpu_dist._work import Work
from tpu_dist.errors import BringUpError
from tpu_dist.runtime.client import release_dropped_clients
from tpu_dist.runtime.environment import read_environment
from tpu_dist.runtime.runtime import current_runtime, start_runtime

# One a process, as the runtime is; the groups that c10d makes one by one meet in it.
_job: Job | None = None
_epochs: set[str] = set()


def create_process_group(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Create the default group or a sub-group: what c10d's extended creator is for.

    Args:
        options: c10d's DistributedBackendOptions.
        backend_options: None, or what another group's `options` returned.

    Raises:
        BringUpError: the runtime could not start.
    """
    global _job
    ranks = list(options.global_ranks_in_group)
    if not ranks:  # the default group
        epoch = _agree_on_epoch(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        store = PrefixStore(epoch, options.store)
        config = read_environment()
        runtime = start_runtime(
            store,
            rank=options.group_rank,
            world_size=options.group_size,
            timeout=options.timeout,
            config=config,
        )
        if _job is None or _job.runtime is not runtime:
            is_first = _job is None
            _job = Job.start(runtime)
            if is_first:  # after the runtime's own, so that it is called before
                atexit.register(_finish_at_exit)
            else:
                Work.forget_recent()  # they hold the last job, and its client
                release_dropped_clients()
        _job.epoch = epoch
        _job.blocking_wait = config.blocking_wait
        ranks = list(range(options.group_size))
    if _job is None or _job.runtime is not current_runtime():
        raise BringUpError(
            "a sub-group on 'tpu_dist' needs a default group on it: call "
            "init_process_group('tpu_dist') first (a default group of another backend will not do)."
        )
    return ProcessGroup(_job, options.store, ranks, options.timeout, str(options.group_id))


def _finish_at_exit() -> None:
    """What was waited for is done before the process ends, unless it ends by an exception."""
    if not hasattr(sys, "last_value"):
        finish_calls()


def _agree_on_epoch(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A word that all ranks of this init_process_group share, and no earlier one had.

    c10d gives every default group the same place in the store, so under torchrun the keys of the
    last time are still there: all that is ours is put under this word.

    Raises:
        BringUpError: rank 0 did not come.
    """
    key = f"epoch/{world_size}"
    if rank == 0:
        store.set(key, secrets.token_hex(8))
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if store.check([key]):
            epoch = bytes(store.get(key)).decode()
            if epoch not in _epochs:
                _epochs.add(epoch)
                return epoch
        if time.monotonic() > deadline:
            raise BringUpError(
                f"rank {rank} waited {timeout.total_seconds():.0f} s for rank 0 to call "
                f"init_process_group, in vain. Look at its log: it failed, or was never started."
            )
        time.sleep(0.005)
