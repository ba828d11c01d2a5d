"""Which hosts are missing, as exactly as can be known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpu_dist.launch.service import rendezvous_pb2 as pb
from tpu_dist.topology.system import System

_SHOWN = 8


def describe_missing(
    here: Sequence[pb.Host],
    *,
    wanted: int,
    gone: Mapping[str, tuple[float, str]],
    hostnames: Mapping[int, Sequence[str]],
    now: float,
) -> str:
    """Say who is missing.

    Args:
        here: the hosts that wait.
        wanted: how many there must be.
        gone: those that were there and are not, with the time and the reason of their going.
        hostnames: the names of each slice's hosts, where known.
        now: on the clock of `gone`.
    """
    num_missing = max(0, wanted - len(here))
    placed = [host.place for host in here if host.HasField("place")]
    if placed:
        missing = _missing_places(placed, hostnames)
    else:
        present = {host.name for host in here}
        missing = [name for name in gone if name not in present][:num_missing]
    words = [name + _why(name, gone, now) for name in missing[:_SHOWN]]
    unnamed = num_missing - len(words)
    if unnamed > 0:
        words.append(f"{unnamed} more" if words else f"{unnamed} that never came")
    came = ", ".join(sorted(host.name for host in here)[:_SHOWN])
    more = f" and {len(here) - _SHOWN} more" if len(here) > _SHOWN else ""
    return f"{', '.join(words) or 'nobody'} (here: {came}{more})"


def _missing_places(
    places: Iterable[pb.Place], hostnames: Mapping[int, Sequence[str]]
) -> list[str]:
    places = list(places)
    system = System.parse(places[0].topology)
    present = {(place.slice, place.host) for place in places}
    missing = []
    for index in range(system.num_slices):
        names = hostnames.get(index, ())
        for host in range(system.slice.num_hosts):
            if (index, host) not in present:
                of_slice = f" of slice {index}" if system.num_slices > 1 else ""
                name = f" ({names[host]})" if host < len(names) else ""
                missing.append(f"host {host}{of_slice}{name}")
    return missing


def _why(name: str, gone: Mapping[str, tuple[float, str]], now: float) -> str:
    if name not in gone:
        return ""
    when, why = gone[name]
    return f" (gone {now - when:.0f} s ago: {why})"
