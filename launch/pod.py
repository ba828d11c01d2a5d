"""What a host of a run on several hosts must know: the others' number, where to meet, who it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tpu_dist.topology.discovery import Place

DEFAULT_JOIN_TIMEOUT = timedelta(minutes=10)
DEFAULT_LAST_CALL = timedelta(seconds=30)  # torchrun's last_call_timeout
DEFAULT_PORT = 8471  # open in the default firewall of TPU VMs, and no port of libtpu's processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the hosts of a run meet.

    Attributes:
        host: name or address of the host with the rendezvous service.
        port: of the service.
        is_here: whether this host is that one, and so starts the service.
        origin: what said so.
    """

    host: str
    port: int
    is_here: bool
    origin: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodConfig:
    """One host's part in a run on several.

    Attributes:
        endpoint: where they meet.
        name: of this host, unique in the run.
        address: by which the other hosts reach this one.
        min_hosts: with fewer no round begins.
        max_hosts: with more none does.
        node_rank: this host's rank where the user chose it.
        place: where it stands in its slice; None without a TPU.
        join_timeout: what hosts get to come.
        last_call: what more than `min_hosts` get to come.
        token: the job's secret.
        tls_directory: of the job's certificates.
    """

    endpoint: Endpoint
    name: str
    address: str
    min_hosts: int
    max_hosts: int
    node_rank: int | None = None
    place: Place | None = None
    join_timeout: timedelta = DEFAULT_JOIN_TIMEOUT
    last_call: timedelta = DEFAULT_LAST_CALL
    token: str | None = field(default=None, repr=False)
    tls_directory: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise ValueError(f"hosts must be 1 <= {self.min_hosts} <= {self.max_hosts}")
