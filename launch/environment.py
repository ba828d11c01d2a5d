"""The environment variables that tpu-launch knows: this is the only module that reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

SETTING_PREFIX = "TPU_LAUNCH_"

# Each option of the command line may come from the environment; the command line wins.
SETTINGS: Mapping[str, str] = {
    "TPU_LAUNCH_NPROC_PER_NODE": "nproc-per-node",
    "TPU_LAUNCH_NNODES": "nnodes",
    "TPU_LAUNCH_RDZV_BACKEND": "rdzv-backend",
    "TPU_LAUNCH_RDZV_ENDPOINT": "rdzv-endpoint",
    "TPU_LAUNCH_RDZV_ID": "rdzv-id",
    "TPU_LAUNCH_RDZV_CONF": "rdzv-conf",
    "TPU_LAUNCH_NODE_RANK": "node-rank",
    "TPU_LAUNCH_NODE_NAME": "node-name",
    "TPU_LAUNCH_LOCAL_ADDR": "local-addr",
    "TPU_LAUNCH_MASTER_ADDR": "master-addr",
    "TPU_LAUNCH_MASTER_PORT": "master-port",
    "TPU_LAUNCH_TOKEN_FILE": "token-file",
    "TPU_LAUNCH_TLS_DIR": "tls-dir",
    "TPU_LAUNCH_STANDALONE": "standalone",
    "TPU_LAUNCH_MAX_RESTARTS": "max-restarts",
    "TPU_LAUNCH_MONITOR_INTERVAL": "monitor-interval",
    "TPU_LAUNCH_SHUTDOWN_TIMEOUT": "shutdown-timeout",
    "TPU_LAUNCH_ROLE": "role",
    "TPU_LAUNCH_MODULE": "module",
    "TPU_LAUNCH_NO_PYTHON": "no-python",
    "TPU_LAUNCH_RUN_PATH": "run-path",
    "TPU_LAUNCH_LOG_DIR": "log-dir",
    "TPU_LAUNCH_REDIRECTS": "redirects",
    "TPU_LAUNCH_TEE": "tee",
    "TPU_LAUNCH_LOCAL_RANKS_FILTER": "local-ranks-filter",
}

TOKEN = "TPU_LAUNCH_TOKEN"  # a secret: never an option, which ps would show
OMP_NUM_THREADS = "OMP_NUM_THREADS"
PYTHON_EXEC = "PYTHON_EXEC"
JAX_PLATFORMS = "JAX_PLATFORMS"
LOG_LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SIGNALS_TO_HANDLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"

# TPU_LAUNCH_BLOCKING is the device's, for the workers.
_KNOWN = frozenset({*SETTINGS, TOKEN, "TPU_LAUNCH_BLOCKING"})

# What discovery of the slice reads: by prefix, and by name.
_TPU_PREFIXES = ("TPU_", "MEGASCALE_", "CLOUD_TPU_")
_TPU_NAMES = frozenset(
    {
        "JOB_COMPLETION_INDEX",
        "JOBSET_NAME",
        "REPLICATED_JOB_NAME",
        "GCE_METADATA_IP",
        "GCE_METADATA_HOST",
    }
)
_SLICE_NAMES = (
    "TPU_ACCELERATOR_TYPE",
    "TPU_TOPOLOGY",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
)

_TORCHELASTIC_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # its default


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the environment says, as read once when the launcher starts.

    Attributes:
        settings: text by variable of ``SETTINGS``; an empty variable counts as unset.
        unknown: variables that look like a setting and are none.
        omp_num_threads: threads per worker, where the user chose.
        python_exec: the interpreter of the workers, as for torchrun.
        stand_in: whether JAX_PLATFORMS keeps the workers off the TPU, on the CPU stand-in.
        log_line_prefix: template of the prefix of tee'd lines, as for torchrun.
        error_file: where whoever started us wants the root cause's error file, as for torchrun.
        tpu: what discovery of the slice may read, by variable.
        token: the job's secret.
    """

    settings: Mapping[str, str]
    unknown: tuple[str, ...] = ()
    omp_num_threads: str | None = None
    python_exec: str | None = None
    stand_in: bool = False
    log_line_prefix: str | None = None
    error_file: str | None = None
    tpu: Mapping[str, str] = field(default_factory=dict)
    token: str | None = field(default=None, repr=False)

    @property
    def names_a_slice(self) -> bool:
        """Whether a variable speaks of a slice."""
        return any(self.tpu.get(name) for name in _SLICE_NAMES)


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Read what concerns the launcher out of ``environ`` (os.environ, or a test's)."""
    platforms = environ.get(JAX_PLATFORMS, "")
    looks_ours = sorted(name for name in environ if name.startswith(SETTING_PREFIX))
    return Environment(
        settings={name: environ[name] for name in SETTINGS if environ.get(name)},
        unknown=tuple(name for name in looks_ours if name not in _KNOWN),
        omp_num_threads=environ.get(OMP_NUM_THREADS) or None,
        python_exec=environ.get(PYTHON_EXEC) or None,
        stand_in=bool(platforms) and "tpu" not in platforms.split(","),
        log_line_prefix=environ.get(LOG_LINE_PREFIX) or None,
        error_file=environ.get(ERROR_FILE) or None,
        tpu={
            name: text
            for name, text in environ.items()
            if name in _TPU_NAMES or (name.startswith(_TPU_PREFIXES) and name not in _KNOWN)
        },
        token=environ.get(TOKEN, "").strip() or None,
    )


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Keep variables from what is started inside: workers inherit what is here."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def quiet_grpc() -> None:
    """Keep gRPC's own log to errors, as jax does for the workers; before gRPC is loaded."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def current() -> Mapping[str, str]:
    """Return what a worker would inherit."""
    return os.environ


@contextmanager
def torchelastic_signals_disarmed() -> Iterator[str]:
    """Keep torchelastic from installing its own signal handlers each time it starts workers.

    Its handlers raise wherever they find the launcher, also between the start of two workers,
    which then are lost; ours wait. The only way to turn them off (torch 2.13) is this variable,
    with a signal that nobody sends.

    Yields:
        What the variable shall be for the workers: what it was, or torchelastic's default.
    """
    before = os.environ.get(SIGNALS_TO_HANDLE)
    os.environ[SIGNALS_TO_HANDLE] = "SIGURG"
    try:
        yield before or _TORCHELASTIC_SIGNALS
    finally:
        del os.environ[SIGNALS_TO_HANDLE]
        if before is not None:
            os.environ[SIGNALS_TO_HANDLE] = before
