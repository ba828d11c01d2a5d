"""The job: what all process groups of this process share, from init_process_group on."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_dist._recorder import Recorder
from tpu_dist.collectives.engine import Engine
from tpu_dist.collectives.monitored_barrier import MonitoredBarriers
from tpu_dist.collectives.point_to_point import PointToPoint
from tpu_dist.runtime.runtime import Runtime


@dataclass(slots=True)
class Job:
    """Made with the default group, and kept for the next one while its runtime is."""

    runtime: Runtime
    engine: Engine
    messages: PointToPoint
    barriers: MonitoredBarriers
    recorder: Recorder = field(default_factory=Recorder)
    blocking_wait: bool = False  # TPU_DIST_BLOCKING_WAIT
    epoch: str = ""  # of the last init_process_group; tells its groups from earlier ones' namesakes

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.runtime.rank

    @classmethod
    def start(cls, runtime: Runtime) -> Job:
        """Start the engine of a runtime."""
        engine = Engine(runtime)
        job = cls(runtime, engine, PointToPoint(engine), MonitoredBarriers(runtime.channel))
        runtime.channel.serve()
        return job
