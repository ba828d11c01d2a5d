"""``tpu-launch doctor``: what this host has, and what would keep a run from working on it.

Each check is a function of a `Machine` that returns findings; none of them opens a chip, but for
the all_reduce at the end, which is a run of its own.
"""

from __future__ import annotations

import errno
import json
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tpu_dist.launch.addresses import own_address
from tpu_dist.launch.environment import Environment
from tpu_dist.launch.holders import holders_of_chips, listener_on
from tpu_dist.launch.pod import DEFAULT_PORT
from tpu_dist.topology.chips import scan_devices
from tpu_dist.topology.claims import Description, value_text
from tpu_dist.topology.discovery import Place, discover
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.source_environment import SKIP_METADATA, describe_environment
from tpu_dist.topology.source_hardware import describe_hardware
from tpu_dist.topology.source_kubernetes import describe_kubernetes
from tpu_dist.topology.source_metadata import MetadataServer, describe_metadata
from tpu_dist.topology.tpu_environment import BASE_PORT

LOCK_FILE = "tmp/libtpu_lockfile"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_PACKAGES = ("tpu-dist", "torch", "jax", "jaxlib", "libtpu", "grpcio", "numpy")
_NEEDED = frozenset({"torch", "jax", "jaxlib", "grpcio", "numpy"})
_WITHOUT_HUGE_PAGES = frozenset({"v2", "v3", "v4"})  # jax warns from v5e on
_ALL_REDUCE_SECONDS = 120.0  # two, and a start and a compile


class Level(Enum):
    """How bad a finding is; the worst decides the exit status."""

    FINE = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found: where, how bad, and what to do where it is."""

    topic: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is looked at.

    Attributes:
        environment: what the launcher would read.
        root: where sysfs, /dev, /proc and /tmp are.
        metadata: the metadata server; None asks none.
    """

    environment: Environment
    root: Path = Path("/")
    metadata: MetadataServer | None = None

    def place(self) -> Place | None:
        """Return where this host stands, if that can be found out."""
        try:
            return discover(self.variables(), root=self.root, metadata=self.metadata)
        except TopologyError:
            return None

    def variables(self) -> dict[str, str]:
        """Return the variables that discovery reads."""
        skip = {SKIP_METADATA: "1"} if self.metadata is None else {}
        return {**self.environment.tpu, **skip}


def examine(machine: Machine, *, all_reduce: bool = True) -> list[Finding]:
    """Run all checks. Blocks for as long as the metadata server and the all_reduce take."""
    checks = [*_CHECKS, _check_all_reduce] if all_reduce else _CHECKS
    return [finding for check in checks for finding in check(machine)]


def to_json(findings: list[Finding]) -> str:
    """Return the findings for a program."""
    return json.dumps([{**asdict(each), "level": each.level.value} for each in findings], indent=1)


def _check_sources(machine: Machine) -> Iterator[Finding]:
    """Say what each source says, which of it is taken, or why it cannot be."""
    variables = machine.variables()
    sources: Mapping[str, Callable[[], Description]] = {
        "variables": lambda: describe_environment(variables),
        "Kubernetes": lambda: describe_kubernetes(variables, describe_environment(variables)),
        "metadata server": lambda: (
            Description() if machine.metadata is None else describe_metadata(machine.metadata)
        ),
        "PCI bus": lambda: describe_hardware(machine.root),
    }
    spoke = False
    for name, describe in sources.items():
        topic = f"source: {name}"
        try:
            claims = describe().claims()
        except TopologyError as error:
            yield Finding(topic=topic, level=Level.FAULT, text=str(error))
            continue
        spoke |= bool(claims)
        said = "; ".join(
            f"{what} {value_text(claim.value)} ({claim.origin})" for what, claim in claims.items()
        )
        yield Finding(topic=topic, level=Level.FINE, text=said or "says nothing")
    if not spoke:
        text = "no TPU: programs run on the CPU stand-in"
        yield Finding(topic="slice", level=Level.NOTE, text=text)
        return
    try:
        place = discover(variables, root=machine.root, metadata=machine.metadata)
    except TopologyError as error:
        yield Finding(topic="slice", level=Level.FAULT, text=str(error))
        return
    won = ", ".join(f"{what} by {origin}" for what, origin in place.origins.items())
    text = (
        f"{place.system}, {place.system.num_hosts} hosts; this is host {place.host} of slice "
        f"{place.slice_index}. Taken: {won}"
    )
    yield Finding(topic="slice", level=Level.FINE, text=text)


def _check_chips(machine: Machine) -> Iterator[Finding]:
    try:
        devices = scan_devices(machine.root)
    except TopologyError as error:
        yield Finding(topic="chips", level=Level.FAULT, text=str(error))
        return
    if devices.kind is None:
        yield Finding(topic="chips", level=Level.NOTE, text="none on the PCI bus")
        return
    missing = devices.chips_on_bus - devices.chips_usable
    text = f"{devices.chips_on_bus} {devices.kind.name}, {devices.count} devices"
    if missing:
        text += f"; {missing} without a file in /dev: give them to this container"
    yield Finding(topic="chips", level=Level.FAULT if missing else Level.FINE, text=text)
    for holder in holders_of_chips(machine.root):
        yield Finding(
            topic="chips",
            level=Level.FAULT,
            text=f"{', '.join(holder.files)} held by {holder}: end it before a run",
        )


def _check_lock(machine: Machine) -> Iterator[Finding]:
    lock = machine.root / LOCK_FILE
    if not lock.exists():
        yield Finding(topic="lock file", level=Level.FINE, text="none")
    elif any(True for _ in holders_of_chips(machine.root)):
        yield Finding(topic="lock file", level=Level.FINE, text=f"{lock}: a chip is in use")
    else:
        text = f"{lock} is left over, nobody holds a chip: remove it"
        yield Finding(topic="lock file", level=Level.FAULT, text=text)


def _check_ports(machine: Machine) -> Iterator[Finding]:
    count = 0
    try:
        count = scan_devices(machine.root).count or 0
    except TopologyError:
        pass  # said already
    for port in (DEFAULT_PORT, *range(BASE_PORT, BASE_PORT + count)):
        what = "rendezvous" if port == DEFAULT_PORT else "libtpu's processes"
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            holder = listener_on(port, machine.root)
            by = str(holder) if holder else "a process that is not ours to see"
            text = f"{port} ({what}) is taken by {by}"
            yield Finding(topic="ports", level=Level.FAULT, text=text)
    yield Finding(
        topic="ports", level=Level.FINE, text=f"looked at {DEFAULT_PORT} and {count} more"
    )


def _check_address(machine: Machine) -> Iterator[Finding]:
    place = machine.place()
    name = socket.gethostname()
    if place is not None and place.hostnames and place.system.slice.num_hosts > 1:
        text = f"{place.hostnames[place.host]}, by {place.origins['hostnames'][:200]}"
        yield Finding(topic="address", level=Level.FINE, text=text)
        first = place.hostnames[0]
        if own_address(first) is None:
            text = f"no way to the first host, {first}: does its name resolve?"
            yield Finding(topic="address", level=Level.FAULT, text=text)
        return
    address = own_address(name)
    text = f"{address}, which others would use" if address else "none but loopback: no other hosts"
    yield Finding(topic="address", level=Level.FINE if address else Level.NOTE, text=text)


def _check_versions(machine: Machine) -> Iterator[Finding]:
    found, missing = [f"python {platform.python_version()}"], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    yield Finding(topic="versions", level=Level.FINE, text=", ".join(found))
    for name in missing:
        needed = name in _NEEDED or (name == "libtpu" and bool(_chips(machine)))
        text = f"{name} is not installed"
        yield Finding(topic="versions", level=Level.FAULT if needed else Level.NOTE, text=text)


def _check_huge_pages(machine: Machine) -> Iterator[Finding]:
    try:
        text = (machine.root / HUGE_PAGES).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        yield Finding(topic="huge pages", level=Level.NOTE, text="not to be read here")
        return
    kind = _chips(machine)
    slow = bool(kind) and kind not in _WITHOUT_HUGE_PAGES and "[always]" not in text
    advice = f": transfers are faster with `echo always > /{HUGE_PAGES}`" if slow else ""
    level = Level.NOTE if slow else Level.FINE
    yield Finding(topic="huge pages", level=level, text=text + advice)


def _check_all_reduce(machine: Machine) -> Iterator[Finding]:
    command = (
        *(sys.executable, "-m", "tpu_dist.launch", "--standalone", "--nproc-per-node=auto"),
        str(Path(__file__).with_name("doctor_worker.py")),
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ALL_REDUCE_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"not done within {_ALL_REDUCE_SECONDS:g} s, compilation included"
        yield Finding(topic="all_reduce", level=Level.FAULT, text=text)
        return
    said = [line for line in done.stdout.splitlines() if line.startswith("all_reduce: ")]
    if done.returncode == 0 and said:
        text = said[-1].removeprefix("all_reduce: ")
        yield Finding(topic="all_reduce", level=Level.FINE, text=text)
    else:
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        text = f"failed with status {done.returncode}:\n{last}"
        yield Finding(topic="all_reduce", level=Level.FAULT, text=text)


def _chips(machine: Machine) -> str | None:
    """Return the name of the generation of this host's chips, if it has any."""
    try:
        kind = scan_devices(machine.root).kind
    except TopologyError:
        return None
    return kind.name if kind is not None else None


_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _check_sources,
    _check_chips,
    _check_lock,
    _check_ports,
    _check_address,
    _check_versions,
    _check_huge_pages,
)
