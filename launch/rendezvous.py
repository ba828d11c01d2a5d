"""How the hosts of a run find each other: decided here, by the settings and the hardware.

One host alone has nobody to find (`standalone`). Several meet at the rendezvous service
(`tpu_dist.launch.service`), beside the first of them unless the user says where.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_dist.launch.addresses import is_own_address, names_loopback, own_address
from tpu_dist.launch.environment import Environment
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.pod import (
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_LAST_CALL,
    DEFAULT_PORT,
    Endpoint,
    PodConfig,
)
from tpu_dist.launch.settings import Setting, parse_flag, parse_int, parse_seconds
from tpu_dist.topology.chips import TpuDevices
from tpu_dist.topology.discovery import Place, discover

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

STANDALONE = "standalone"
TPU = "tpu"

_BACKENDS = (TPU, "c10d", "static", STANDALONE)  # torchrun's names are understood, and mean ours
_NO_ENDPOINT = frozenset({"localhost:0", "127.0.0.1:0"})  # torchrun's way to say "any port, here"
_CONF = {"join_timeout": "join-timeout", "timeout": "join-timeout", "last_call_timeout": "last"}


def choose_rendezvous(
    settings: Mapping[str, Setting],
    environment: Environment,
    devices: TpuDevices,
    *,
    root: Path = Path("/"),
) -> PodConfig | None:
    """Return this host's part in a run on several hosts, or None where it is alone.

    Blocks for as long as discovery does, where the number of hosts is to be found.

    Raises:
        LaunchError: the settings contradict each other or leave open what must be known.
        TopologyError: the hardware cannot be what the sources say of it.
    """
    backend = settings.get("rdzv-backend")
    if backend is not None and backend.text not in _BACKENDS:
        raise backend.error(f"expected one of {', '.join(_BACKENDS)}")
    endpoint = _given_endpoint(settings)
    if parse_flag(settings.get("standalone")):
        if _asks_for_several(settings):
            raise settings["nnodes"].error("--standalone is one host alone: leave one of them out")
        return None
    limits = _given_hosts(settings.get("nnodes"))
    place = None
    if limits is None or limits[1] > 1:
        place = _find_place(environment, devices, root)
    if limits is None:
        count = place.system.num_hosts if place is not None else 1
        limits = (count, count)
    if limits[1] == 1 and endpoint is None:
        return None
    low, high = limits
    if place is not None and (low, high) != (place.system.num_hosts,) * 2:
        said = settings["nnodes"] if "nnodes" in settings else None
        text = f"{said.source} {said.text}" if said else f"{high} hosts"
        raise LaunchError(
            f"{text}: {place.system} has {place.system.num_hosts} hosts, and all of them must "
            f"take part. Leave --nnodes out, or set JAX_PLATFORMS=cpu and unset the TPU variables"
        )
    chosen = endpoint or _elected(place)
    if chosen is None:
        raise LaunchError(
            f"{high} hosts, and nothing says where they meet. Give --rdzv-endpoint HOST:PORT, the "
            f"same on all of them: HOST is any one of them"
        )
    conf = _conf(settings.get("rdzv-conf"))
    return PodConfig(
        endpoint=chosen,
        name=_name(settings.get("node-name")),
        address=_address(settings.get("local-addr"), chosen, place),
        min_hosts=low,
        max_hosts=high,
        node_rank=_node_rank(settings.get("node-rank"), high),
        place=place,
        join_timeout=parse_seconds(conf.get("join-timeout"), default=DEFAULT_JOIN_TIMEOUT),
        last_call=_last_call(conf),
        token=read_token(settings.get("token-file"), environment),
        tls_directory=_directory(settings.get("tls-dir")),
    )


def open_rendezvous(name: str, run_id: str) -> RendezvousHandler:
    """Open the rendezvous of a single host; the caller shuts it down.

    Args:
        name: ``STANDALONE``.
        run_id: the run's name.
    """
    return _RENDEZVOUS[name](run_id)


def _open_standalone(run_id: str) -> RendezvousHandler:
    from tpu_dist.launch.standalone import StandaloneRendezvous

    return StandaloneRendezvous(run_id)


_RENDEZVOUS: Mapping[str, Callable[[str], RendezvousHandler]] = {STANDALONE: _open_standalone}


def parse_endpoint(text: str, origin: str) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port`` or ``[address]:port``.

    Raises:
        LaunchError: it is none of these.
    """
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]{1,253})(?::(\d{1,5}))?", text, re.ASCII)
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65_536:
        raise LaunchError(f"{origin} {text!r}: expected HOST:PORT, as in tpu-vm-0:{DEFAULT_PORT}")
    return match[1].strip("[]"), port


def _given_endpoint(settings: Mapping[str, Setting]) -> Endpoint | None:
    endpoint, master = settings.get("rdzv-endpoint"), settings.get("master-addr")
    port = settings.get("master-port")
    if endpoint is not None and endpoint.text in _NO_ENDPOINT:
        endpoint = None
    if endpoint is None and master is None:
        if port is not None:
            raise port.error("it needs --master-addr beside it")
        return None
    if endpoint is not None and master is not None:
        raise endpoint.error(f"{master.source} says where hosts meet, too: leave one of them out")
    if endpoint is not None:
        given = endpoint
        host, number = parse_endpoint(given.text, given.source)
    else:
        assert master is not None
        given = master
        host, number = parse_endpoint(given.text, given.source)
        number = parse_int(port, default=number, minimum=1)
    return Endpoint(host=host, port=number, is_here=is_own_address(host), origin=given.source)


def _elected(place: Place | None) -> Endpoint | None:
    """Return the first host of the first slice, where the sources say who that is."""
    if place is None:
        return None
    is_here = place.slice_index == 0 and place.host == 0
    if place.system.num_slices > 1:
        if place.coordinator is None:
            return None
        host, _ = parse_endpoint(place.coordinator, place.origins.get("coordinator", "coordinator"))
        origin = place.origins.get("coordinator", "")
    elif place.hostnames:
        host, origin = place.hostnames[0], place.origins.get("hostnames", "")
    else:
        return None
    return Endpoint(host=host, port=DEFAULT_PORT, is_here=is_here, origin=origin)


def _asks_for_several(settings: Mapping[str, Setting]) -> bool:
    limits = _given_hosts(settings.get("nnodes"))
    return limits is not None and limits[1] > 1


def _given_hosts(setting: Setting | None) -> tuple[int, int] | None:
    """Return the least and the greatest number of hosts; None: as many as the hardware has."""
    if setting is None or setting.text == "auto":
        return None
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", setting.text, re.ASCII)
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not 1 <= low <= high:
        raise setting.error("expected a number of hosts, MIN:MAX, or auto")
    return low, high


def _find_place(environment: Environment, devices: TpuDevices, root: Path) -> Place | None:
    """Return where this host stands; None where nothing looks like a TPU."""
    if not devices.chips_on_bus and not environment.names_a_slice:
        return None
    return discover(environment.tpu, root=root)


def _conf(setting: Setting | None) -> dict[str, Setting]:
    if setting is None:
        return {}
    found = {}
    for item in filter(None, setting.text.split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in _CONF or not value:
            raise setting.error(f"expected NAME=SECONDS of {', '.join(_CONF)}, got {item!r}")
        found[_CONF[name]] = Setting(value, f"{setting.source} {name}")
    return found


def _last_call(conf: Mapping[str, Setting]) -> timedelta:
    return parse_seconds(conf.get("last"), default=DEFAULT_LAST_CALL, zero_allowed=True)


def _node_rank(setting: Setting | None, max_hosts: int) -> int | None:
    if setting is None:
        return None
    rank = parse_int(setting, default=0, minimum=0)
    if rank >= max_hosts:
        raise setting.error(
            f"ranks of {max_hosts} hosts go from 0 to {max_hosts - 1}. It counts hosts, not "
            f"workers or chips"
        )
    return rank


def _name(setting: Setting | None) -> str:
    name = socket.gethostname() if setting is None else setting.text
    if not re.fullmatch(r"[\w.:-]{1,253}", name, re.ASCII):
        raise LaunchError(f"--node-name {name!r}: expected letters, digits, dots and dashes")
    return name


def _address(setting: Setting | None, endpoint: Endpoint, place: Place | None) -> str:
    if setting is not None:
        return setting.text
    if place is not None and place.hostnames and place.system.slice.num_hosts > 1:
        return place.hostnames[place.host]
    address = own_address(endpoint.host)
    if address is None:
        if endpoint.is_here:
            return endpoint.host
        raise LaunchError(
            f"no route from here to {endpoint.host} ({endpoint.origin}), so the address by which "
            f"others reach this host is not known. Does the name resolve? Or give --local-addr"
        )
    return address


def read_token(setting: Setting | None, environment: Environment) -> str | None:
    """Return the job's secret: of the file that the setting names, else the environment's.

    Raises:
        LaunchError: the file cannot be read.
    """
    if setting is None:
        return environment.token
    try:
        return Path(setting.text).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise setting.error(f"cannot be read: {error}") from error


def _directory(setting: Setting | None) -> Path | None:
    return None if setting is None else Path(setting.text).absolute()


def listening_address(endpoint: Endpoint) -> str:
    """Return where a service for `endpoint` listens: on loopback only if that is all it says."""
    if names_loopback(endpoint.host):
        return "[::1]" if ":" in endpoint.host else "127.0.0.1"
    return "[::]" if ":" in endpoint.host else "0.0.0.0"
