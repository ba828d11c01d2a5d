"""Forked children: a PJRT client does not survive a fork, and cannot be started again after one."""

from __future__ import annotations

import os

from tpu_dist.topology.errors import BringUpError

_started_in: list[int] = []  # ids of the processes: this one, and those that it was forked from


def client_started() -> None:
    """This process has a PJRT client from now on."""
    if _started_in[-1:] != [os.getpid()]:
        _started_in.append(os.getpid())


def is_forked_child() -> bool:
    """Whether this process was forked from one that had a client: it cannot have one."""
    return bool(_started_in) and _started_in[-1] != os.getpid()


def refuse_forked_child() -> None:
    """Raise BringUpError in a process that was forked from one that had a client."""
    if is_forked_child():
        raise BringUpError(
            f"this process was forked from process {_started_in[-1]} after that one had started "
            f"its PJRT client; a client cannot be used or started again in a forked child. Use the "
            f"start method 'spawn' (mp.spawn, tpu-launch, torchrun; for a DataLoader "
            f"multiprocessing_context='spawn'), fork before the first tensor on 'tpu' and before "
            f"init_process_group, or keep 'tpu' out of the child."
        )
