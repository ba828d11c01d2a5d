"""The drawing of ``tpu-launch topo`` as a PNG; needs matplotlib (the extra ``tpu-dist[plot]``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_dist.launch.errors import LaunchError
from tpu_dist.topology.coordinates import Coord
from tpu_dist.topology.links import Link, links_of
from tpu_dist.topology.mesh_layout import MeshLayout
from tpu_dist.topology.rank_map import coordinates
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.system import System

_MOST_PLANES = 16
_MOST_NAMED = 64  # chips of a plane that have room for a name
_INCHES_PER_CHIP = 0.62
_LARGEST = 20.0  # inches of the whole drawing


def plot_slice(
    path: Path,
    system: System,
    labels: Sequence[str],
    *,
    title: str,
    layout: MeshLayout | None = None,
    axis: int | None = None,
    slice_index: int = 0,
) -> None:
    """Write the planes of a slice: chips coloured by host or group, links, wrap-around as stubs.

    Args:
        path: of the PNG.
        system: what is drawn.
        labels: of each chip, in the order of ranks.
        title: above the drawing.
        layout: of a mesh, if groups are drawn.
        axis: of the mesh, if groups are drawn.
        slice_index: which slice is drawn.

    Raises:
        LaunchError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LaunchError("--plot needs matplotlib: pip install 'tpu-dist[plot]'") from None
    slice_ = system.slice
    planes = min(slice_.shape.z, _MOST_PLANES)
    columns = math.ceil(math.sqrt(planes))
    rows = math.ceil(planes / columns)
    size = min(_LARGEST / columns, 1.0 + _INCHES_PER_CHIP * max(slice_.shape.x, slice_.shape.y))
    figure = Figure(figsize=(size * columns, size * rows + 0.6), layout="constrained")
    hidden = slice_.shape.z - planes
    figure.suptitle(title + (f"\nplanes 0 to {planes - 1} of {slice_.shape.z}" if hidden else ""))
    if layout is None or axis is None:
        colours = [int(slice_.host_of(coord)) for coord in slice_.coords()]
    else:
        colours = _first_groups(layout, axis, slice_index)
    for z in range(planes):
        panel = figure.add_subplot(rows, columns, z + 1)
        _draw_plane(panel, slice_, labels, colours, z)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise LaunchError(f"--plot {str(path)!r}: {error.strerror or error}") from error


def _draw_plane(
    panel: Any, slice_: Slice, labels: Sequence[str], colours: Sequence[int], z: int
) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Rectangle

    palette = colormaps["tab20"]
    plane = [Coord(x, y, z) for x in range(slice_.shape.x) for y in range(slice_.shape.y)]
    chips = [slice_.rank_of(coord) // slice_.generation.devices_per_chip for coord in plane]
    links: dict[bool, list[tuple[tuple[float, float], ...]]] = {True: [], False: []}
    for coord in plane:
        for link in links_of(slice_, coord):
            if link.axis < 2:
                links[link.is_wrap].append(_half_link(coord, link))
    for is_wrap, style in ((False, "-"), (True, ":")):
        panel.add_collection(
            LineCollection(links[is_wrap], linestyles=style, colors="black", lw=1, zorder=0)
        )
    squares = [Rectangle((coord.y - 0.36, coord.x - 0.36), 0.72, 0.72) for coord in plane]
    faces = [palette(colours[chip] % palette.N) for chip in chips]
    panel.add_collection(PatchCollection(squares, facecolors=faces, edgecolors="black"))
    if len(plane) <= _MOST_NAMED:
        for coord, chip in zip(plane, chips, strict=True):
            panel.text(coord.y, coord.x, labels[chip], ha="center", va="center", fontsize=7)
    grid = slice_.host_grid
    hosts = [
        Rectangle((y - 0.46, x - 0.46), grid.y - 0.08, grid.x - 0.08)
        for x in range(0, slice_.shape.x, grid.x)
        for y in range(0, slice_.shape.y, grid.y)
    ]
    panel.add_collection(
        PatchCollection(hosts, facecolors="none", edgecolors="grey", linestyles="--")
    )
    panel.set_xlim(-0.9, slice_.shape.y - 0.1)
    panel.set_ylim(slice_.shape.x - 0.1, -0.9)
    panel.set_aspect("equal")
    panel.set_xlabel("y")
    panel.set_ylabel("x")
    if slice_.shape.z > 1:
        panel.set_title(f"z = {z}", fontsize=9)


def _half_link(coord: Coord, link: Link) -> tuple[tuple[float, float], ...]:
    """Return one half of a link, to which the neighbour's fits; of a wrapped one, a stub."""
    along = (0.75 if link.is_wrap else 0.5) * link.step
    dx, dy = (along, 0.0) if link.axis == 0 else (0.0, along)
    return (float(coord.y), float(coord.x)), (coord.y + dy, coord.x + dx)


def _first_groups(layout: MeshLayout, axis: int, slice_index: int) -> list[int]:
    """Return the number of the group that each chip's first device is in."""
    system = layout.system
    group_of = [0] * system.num_devices
    for number, members in enumerate(layout.groups(axis).tolist()):
        for device in members:
            group_of[device] = number
    table = coordinates(system)
    first = (table[:, 0] == slice_index) & (table[:, 4] == 0)
    return [group_of[device] for device in first.nonzero()[0].tolist()]
