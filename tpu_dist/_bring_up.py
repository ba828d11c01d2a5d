"""From c10d's call to a process group: starts the job with the default group."""

from __future__ import annotations

from typing import Any

from tpu_dist._job import Job
from tpu_dist._process_group import ProcessGroup
from tpu_dist.errors import BringUpError
from tpu_dist.runtime.environment import read_environment
from tpu_dist.runtime.runtime import current_runtime, start_runtime

# One a process, as the runtime is; the groups that c10d makes one by one meet in it.
_job: Job | None = None


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
        store = options.store.clone()
        runtime = start_runtime(
            store,
            rank=options.group_rank,
            world_size=options.group_size,
            timeout=options.timeout,
            config=read_environment(),
        )
        if _job is None or _job.runtime is not runtime:
            _job = Job.start(runtime, store)
        else:
            _job.engine.store = store
        ranks = list(range(options.group_size))
    if _job is None or _job.runtime is not current_runtime():
        raise BringUpError(
            "a sub-group on 'tpu_dist' needs a default group on it: call "
            "init_process_group('tpu_dist') first (a default group of another backend will not do)."
        )
    return ProcessGroup(_job, options.store, ranks, options.timeout, str(options.group_id))
