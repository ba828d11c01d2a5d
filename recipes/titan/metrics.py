"""torchtitan's metrics, with what the device counts, and as lines of JSON.

`compatibility.prepare` comes before this module is imported.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank
from torchtitan.tools.utils import device_type

FILE = "metrics.jsonl"
"""In job.dump_folder: an object a logged step, of the rank that has the loss; a resumed run adds
to it."""


class DeviceMetrics(MetricsProcessor):  # type: ignore[misc]  # torchtitan is untyped
    """torchtitan's metrics; ``device/programs`` and ``device/fallbacks`` besides.

    Programs that are compiled after the second step, and operators that fall back to the CPU, are
    what to look for where a step takes longer than it should.
    """

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one step to the console and TensorBoard, as torchtitan does, and to `FILE`."""
        counted = _device_counts()
        memory = self.device_memory_monitor.get_peak_stats()
        steps = max(1, min(step, self.job_config.metrics.log_freq))
        self._write(
            step=step,
            loss=global_avg_loss,
            grad_norm=grad_norm,
            seconds_per_step=(time.perf_counter() - self.time_last_log) / steps,
            peak_bytes=round(memory.max_active_gib * 2**30),
            **counted,
        )
        extra = {**(extra_metrics or {}), **{f"device/{k}": v for k, v in counted.items()}}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log one validation, likewise."""
        self._write(step=step, validation_loss=loss)
        super().log_validation(loss, step, extra_metrics)

    def _write(self, **values: object) -> None:
        if dist.get_rank() != _get_metrics_rank(self.parallel_dims, self.job_config):
            return
        with (Path(self.job_config.job.dump_folder) / FILE).open("a") as lines:
            lines.write(json.dumps(values) + "\n")


def _device_counts() -> dict[str, int]:
    if device_type != "tpu":
        return {}
    device: Any = torch.tpu  # type: ignore[attr-defined]
    return {
        "programs": device.num_compiled_programs(),
        "fallbacks": sum(device.fallback_counts().values()),
    }
