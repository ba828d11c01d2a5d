"""A worker's failure as the protocol tells it, and back."""

from __future__ import annotations

import time
from datetime import timedelta

from tpu_dist.launch.failure import RoundFailure, WorkerFailure
from tpu_dist.launch.processes import WorkerExit
from tpu_dist.launch.service import rendezvous_pb2 as pb


def failure_message(failure: RoundFailure) -> pb.Failure:
    """Return what the other hosts are told of a failure of this host's workers."""
    root, end = failure.root, failure.root.end
    return pb.Failure(
        rank=end.rank,
        local_rank=end.local_rank,
        pid=end.pid,
        exit_code=end.exit_code,
        age_seconds=max(0.0, time.time() - root.at),
        ran_for_seconds=end.ran_for.total_seconds(),
        message=root.message or "",
        traceback=root.traceback or "",
    )


def exit_message(end: WorkerExit) -> pb.Failure:
    """Return what can be told at once, before logs and error files are read."""
    return failure_message(RoundFailure(root=WorkerFailure(end=end, at=end.at)))


def round_failure(message: pb.Failure) -> RoundFailure:
    """Return the failure of another host's worker."""
    at = time.time() - message.age_seconds
    end = WorkerExit(
        rank=message.rank,
        local_rank=message.local_rank,
        pid=message.pid,
        exit_code=message.exit_code or 1,
        at=at,
        ran_for=timedelta(seconds=message.ran_for_seconds),
        asked=False,
    )
    return RoundFailure(
        root=WorkerFailure(
            end=end,
            at=at,
            message=message.message or None,
            traceback=message.traceback or None,
        )
    )
