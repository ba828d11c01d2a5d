"""Keeping the CPU stand-in's transport thread from running in front of those it serves.

gloo's event loop polls without a pause while another thread holds the lock of a connection. Where
that other thread sends, and the loop wakes up on its core in front of it, the loop polls until the
next tick of the scheduler takes the core away, 4 ms at 250 Hz: measured on 2 cores as 2 to 8 ms for
programs of 0.2 ms. Under SCHED_BATCH a thread that wakes up does not preempt one that runs.
"""

from __future__ import annotations

import contextlib
import os

ThreadId = int


def thread_ids() -> frozenset[ThreadId]:
    """The threads of this process."""
    return frozenset(map(int, os.listdir("/proc/self/task")))


def run_behind_others(threads: frozenset[ThreadId]) -> None:
    """Let `threads` preempt nobody when they wake up; those that have ended are passed over."""
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
