"""LaunchConfig: all that one run of tpu-launch needs, built once from arguments and environment."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tpu_dist.launch.entry import Entry, check_entry, entry_kind
from tpu_dist.launch.environment import PYTHON_EXEC, SETTING_PREFIX, Environment
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.pod import PodConfig
from tpu_dist.launch.rendezvous import choose_rendezvous
from tpu_dist.launch.settings import (
    Setting,
    Streams,
    merge_settings,
    parse_flag,
    parse_int,
    parse_ranks,
    parse_seconds,
    parse_streams,
)
from tpu_dist.launch.worker_count import Host, count_workers
from tpu_dist.topology.chips import TpuDevices, scan_devices

DEFAULT_MONITOR_INTERVAL = timedelta(seconds=0.1)
DEFAULT_SHUTDOWN_TIMEOUT = timedelta(seconds=30)
DEFAULT_ROLE = "default"
DEFAULT_POD_RUN_ID = "none"  # torchrun's

_POD_PREFIX = "[${rank}]:"
_ALL_DEVICES = Setting("auto", "the default of --nproc-per-node on a slice of several hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What one run of tpu-launch needs.

    Attributes:
        entry: what each worker runs.
        python: the workers' interpreter.
        num_workers: workers on this host.
        pod: this host's part in a run on several hosts; None where it is alone.
        sets_tpu: whether the workers of such a run drive TPU devices, and are told which.
        run_id: the run's name, in TORCHELASTIC_RUN_ID and in its log directory's name.
        max_restarts: how often all workers are started anew after a failure.
        monitor_interval: how often the workers are looked at.
        shutdown_timeout: what workers that are asked to end get before SIGKILL.
        role: the workers' role, in the prefix of tee'd lines.
        log_dir: where logs go; None is a temporary directory, removed unless logs were asked for.
        redirects: streams that go to files instead of the terminal, by local rank.
        tee: streams that go to files and to the terminal, by local rank.
        local_ranks_filter: ranks that may write to the terminal; None is all.
        log_line_prefix: template of the prefix of tee'd lines; None is torchelastic's.
        omp_num_threads: threads per worker to set; None where the user chose or one worker has
            all cores.
        error_file: where to copy the root cause's error file.
        notices: what the user should be told before the workers start.
    """

    entry: Entry
    num_workers: int
    run_id: str
    python: str = sys.executable
    pod: PodConfig | None = None
    sets_tpu: bool = False
    max_restarts: int = 0
    monitor_interval: timedelta = DEFAULT_MONITOR_INTERVAL
    shutdown_timeout: timedelta = DEFAULT_SHUTDOWN_TIMEOUT
    role: str = DEFAULT_ROLE
    log_dir: Path | None = None
    redirects: Mapping[int, Streams]
    tee: Mapping[int, Streams]
    local_ranks_filter: frozenset[int] | None = None
    log_line_prefix: str | None = None
    omp_num_threads: int | None = None
    error_file: Path | None = None
    notices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {self.num_workers}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        if self.monitor_interval <= timedelta(0):
            raise ValueError(f"monitor_interval must be positive, got {self.monitor_interval}")

    @property
    def writes_logs(self) -> bool:
        """Whether any stream of any worker goes to a file."""
        return any(self.redirects.values()) or any(self.tee.values())


def build_config(
    arguments: Mapping[str, str],
    target: str,
    target_arguments: tuple[str, ...],
    environment: Environment,
    *,
    root: Path = Path("/"),
    num_cores: int | None = None,
) -> LaunchConfig:
    """Build the config of a run, and refuse one that cannot work; starts and writes nothing.

    Args:
        arguments: text by setting (``max-restarts``) as given on the command line.
        target: the script, module or command.
        target_arguments: what follows it.
        environment: what `read_environment` returned.
        root: where sysfs and /dev are looked for, the device count's source.
        num_cores: CPU cores to share among the workers; None asks the system.

    Raises:
        LaunchError: a setting or the target is wrong, or asks for what is not supported.
    """
    settings = merge_settings(arguments, environment.settings)
    entry = Entry(
        kind=entry_kind(
            module=parse_flag(settings.get("module")),
            no_python=parse_flag(settings.get("no-python")),
            run_path=parse_flag(settings.get("run-path")),
        ),
        target=target,
        arguments=target_arguments,
    )
    python = environment.python_exec or sys.executable
    if shutil.which(python) is None:
        raise LaunchError(f"{PYTHON_EXEC} {python!r}: no such interpreter")
    check_entry(entry, own_python=environment.python_exec is None)
    cores = _num_cores() if num_cores is None else num_cores
    devices = TpuDevices() if environment.stand_in else scan_devices(root)
    pod = choose_rendezvous(settings, environment, devices, root=root)
    workers = count_workers(
        settings.get("nproc-per-node") or (_ALL_DEVICES if pod and devices.chips_on_bus else None),
        Host(num_cores=cores, devices=devices, stand_in=environment.stand_in),
    )
    threads = None
    if environment.omp_num_threads is None and workers.count > 1:
        threads = max(1, cores // workers.count)
    return LaunchConfig(
        entry=entry,
        python=python,
        num_workers=workers.count,
        pod=pod,
        sets_tpu=bool(devices.chips_on_bus),
        run_id=_run_id(settings.get("rdzv-id"), pod, environment),
        max_restarts=parse_int(settings.get("max-restarts"), default=0, minimum=0),
        monitor_interval=parse_seconds(
            settings.get("monitor-interval"), default=DEFAULT_MONITOR_INTERVAL
        ),
        shutdown_timeout=parse_seconds(
            settings.get("shutdown-timeout"), default=DEFAULT_SHUTDOWN_TIMEOUT, zero_allowed=True
        ),
        role=_text(settings.get("role"), DEFAULT_ROLE),
        log_dir=_path(settings.get("log-dir")),
        redirects=parse_streams(settings.get("redirects"), num_workers=workers.count),
        tee=parse_streams(_tee(settings.get("tee"), pod), num_workers=workers.count),
        local_ranks_filter=parse_ranks(
            settings.get("local-ranks-filter"), num_workers=workers.count
        ),
        log_line_prefix=environment.log_line_prefix or (_POD_PREFIX if pod else None),
        omp_num_threads=threads,
        error_file=Path(environment.error_file) if environment.error_file else None,
        notices=_notices(environment, workers.notice, threads, workers.count, cores),
    )


def _notices(
    environment: Environment,
    of_count: str | None,
    threads: int | None,
    num_workers: int,
    cores: int,
) -> tuple[str, ...]:
    notices = [
        f"{name} is set, and no setting has that name: ignored. The settings are those that "
        f"--help lists, as in {SETTING_PREFIX}NPROC_PER_NODE"
        for name in environment.unknown
    ]
    if of_count:
        notices.append(of_count)
    if threads is not None:
        notices.append(
            f"OMP_NUM_THREADS={threads} for each worker ({cores} cores, {num_workers} workers); "
            f"set it to choose another number"
        )
    return tuple(notices)


def _num_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_id(setting: Setting | None, pod: PodConfig | None, environment: Environment) -> str:
    if setting is None and pod is not None:  # all hosts must come to the same
        return environment.tpu.get("JOBSET_NAME") or DEFAULT_POD_RUN_ID
    if setting is None:
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    if os.sep in setting.text:
        raise setting.error(f"a run's id names a directory, and cannot have a {os.sep!r} in it")
    return setting.text


def _tee(setting: Setting | None, pod: PodConfig | None) -> Setting | None:
    """On several hosts stderr is kept: what a worker said last is shown on all of them."""
    if setting is None and pod is not None:
        return Setting(str(int(Streams.STDERR)), "--tee")
    return setting


def _text(setting: Setting | None, default: str) -> str:
    return default if setting is None else setting.text


def _path(setting: Setting | None) -> Path | None:
    # Absolute: a worker may change its directory before it writes its error file.
    return None if setting is None else Path(setting.text).absolute()
