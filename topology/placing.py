"""From claims to facts: which slice they describe, and which of its hosts this one is."""

from __future__ import annotations

from dataclasses import replace

from tpu_dist.topology.claims import Claim, Description, agree, contradiction
from tpu_dist.topology.coordinates import HostId, Shape
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.generations import Generation
from tpu_dist.topology.shapes import format_for, shapes_of_size
from tpu_dist.topology.slice import Slice

_HOW = (
    "Set TPU_ACCELERATOR_TYPE (as in v5p-128) and, where that leaves several shapes, TPU_TOPOLOGY "
    "(as in 4x4x8)"
)


def find_slice(known: Description) -> Slice:
    """Return the slice that the claims describe.

    Raises:
        TopologyError: none can be as they say, or they do not say enough.
    """
    if known.generation is None:
        raise TopologyError(
            f"nothing says which TPU this is: no variable, no metadata server, no chip on the PCI "
            f"bus. {_HOW}, or run on a TPU host."
        )
    generation = known.generation.value
    shape = _find_shape(known, generation)
    if known.num_chips is not None and known.num_chips.value != shape.value.volume:
        raise contradiction(
            "the number of chips of a slice",
            known.num_chips,
            Claim(shape.value.volume, f"{_text(generation, shape)}"),
        )
    try:
        slice_ = Slice.of(
            generation,
            shape.value,
            chips_per_host=known.chips_per_host.value if known.chips_per_host else None,
            twisted=known.twisted.value if known.twisted else False,
        )
    except TopologyError as error:
        said = [shape.origin] + ([known.chips_per_host.origin] if known.chips_per_host else [])
        raise TopologyError(f"{error} (found: {', '.join(said)})") from None
    if known.wrap is not None:
        slice_ = replace(slice_, wrap=known.wrap.value)
    _check_hosts(known, slice_, shape)
    return slice_


def find_num_slices(known: Description) -> int:
    """Return how many slices the job has: 1 if nobody speaks of several.

    Raises:
        TopologyError: none.
    """
    if known.num_slices is None:
        return 1
    if known.num_slices.value < 1:
        raise TopologyError(
            f"{known.num_slices.origin}: a job has at least one slice. Correct or unset it."
        )
    return known.num_slices.value


def find_slice_index(known: Description, num_slices: int) -> int:
    """Return which slice this host is in.

    Raises:
        TopologyError: nobody said, or there is no such slice.
    """
    if known.slice_index is None:
        if num_slices == 1:
            return 0
        raise TopologyError(
            f"the job has {num_slices} slices, and nothing says which one this host is in. Set "
            f"MEGASCALE_SLICE_ID."
        )
    index = known.slice_index.value
    if index >= num_slices:
        said = known.num_slices.origin if known.num_slices else "nothing speaks of several"
        raise TopologyError(
            f"this host is in slice {index} by {known.slice_index.origin}, but there are only "
            f"{num_slices} ({said}). Correct MEGASCALE_SLICE_ID or MEGASCALE_NUM_SLICES."
        )
    return index


def find_host(known: Description, slice_: Slice, own_name: str | None) -> HostId:
    """Return which host of its slice this one is.

    Raises:
        TopologyError: nobody said, or it cannot be.
    """
    named = _host_by_name(known, own_name)
    claims = [known.host, _host_by_task(known, slice_)]
    if slice_.num_hosts > 1:  # else the index counts jobs that have nothing to do with each other
        claims += [known.completion_index, named]
    found = agree("the index of this host", claims)
    if found is None:
        if slice_.num_hosts == 1:
            return HostId(0)
        raise TopologyError(
            f"{slice_} has {slice_.num_hosts} hosts, and nothing says which one this is. Set "
            f"TPU_WORKER_ID, 0 to {slice_.num_hosts - 1}."
        )
    if found.value >= slice_.num_hosts:
        raise TopologyError(
            f"this is host {found.value} by {found.origin}, but {slice_} has {slice_.num_hosts} "
            f"({_origin(known)}). One of them is left over from another slice: correct it."
        )
    return HostId(found.value)


def _find_shape(known: Description, generation: Generation) -> Claim[Shape]:
    claims = [known.shape]
    if known.host_bounds is not None:
        chips = known.chips_per_host
        grid = generation.host_grid(chips.value if chips else generation.chips_per_host)
        origin = known.host_bounds.origin + (f" and {chips.origin}" if chips else "")
        claims.append(Claim(known.host_bounds.value.times(grid), origin))
    found = agree("the shape of a slice", claims)
    if found is not None:
        return found
    if known.num_chips is not None:
        return _shape_of_size(generation, known.num_chips)
    is_alone = known.hostnames is None or len(known.hostnames.value) == 1
    if known.chips_per_host is not None and is_alone:
        grid = generation.host_grid(known.chips_per_host.value)
        return Claim(grid, known.chips_per_host.origin)
    hosts = f" of {len(known.hostnames.value)} hosts" if known.hostnames else ""
    raise TopologyError(f"nothing says which shape the {generation} slice{hosts} has. {_HOW}.")


def _shape_of_size(generation: Generation, num_chips: Claim[int]) -> Claim[Shape]:
    shapes = shapes_of_size(generation, num_chips.value)
    if len(shapes) == 1:
        return Claim(shapes[0], num_chips.origin)
    candidates = ", ".join(format_for(generation, shape) for shape in shapes) or "no shape at all"
    raise TopologyError(
        f"a {generation} slice of {num_chips.value} chips ({num_chips.origin}) may be "
        f"{candidates}. Set TPU_TOPOLOGY."
    )


def _check_hosts(known: Description, slice_: Slice, shape: Claim[Shape]) -> None:
    if known.host_bounds is not None and known.host_bounds.value != slice_.host_bounds:
        raise contradiction(
            "the grid of hosts",
            known.host_bounds,
            Claim(slice_.host_bounds, f"{shape.origin}, {slice_.chips_per_host} chips a host"),
        )
    hosts = known.hostnames
    if hosts is not None and len(hosts.value) != slice_.num_hosts:
        raise TopologyError(
            f"{hosts.origin} lists {len(hosts.value)} hosts, but {slice_} ({shape.origin}) has "
            f"{slice_.num_hosts} of {slice_.chips_per_host} chips. One of them is left over from "
            f"another slice, or describes a single host: unset or correct it."
        )


def _host_by_task(known: Description, slice_: Slice) -> Claim[int] | None:
    """Turn the index of a process into the host's, where a host has several."""
    if known.task is None:
        return None
    count = known.num_processes.value if known.num_processes else slice_.num_hosts
    per_host, rest = divmod(count, slice_.num_hosts)
    if rest or known.task.value >= count:
        raise TopologyError(
            f"{known.task.origin} is a process of {count}, which {slice_.num_hosts} hosts of "
            f"{slice_} cannot share ({_origin(known)}). Unset CLOUD_TPU_TASK_ID."
        )
    return Claim(known.task.value // per_host, known.task.origin)


def _host_by_name(known: Description, own_name: str | None) -> Claim[int] | None:
    if known.hostnames is None or not own_name:
        return None
    labels = [name.partition(".")[0].lower() for name in known.hostnames.value]
    own = own_name.partition(".")[0].lower()
    if own.isdigit() or labels.count(own) != 1:
        return None
    return Claim(labels.index(own), f"this host's name, {own_name}, in {known.hostnames.origin}")


def _origin(known: Description) -> str:
    claims = (known.shape, known.num_processes, known.host_bounds, known.num_chips)
    return ", ".join(claim.origin for claim in claims if claim is not None)


def _text(generation: Generation, shape: Claim[Shape]) -> str:
    return f"the shape {format_for(generation, shape.value)} ({shape.origin})"
