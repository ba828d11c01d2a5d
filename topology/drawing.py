"""A slice as text: its figures, and its chips plane by plane with the hosts drawn around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpu_dist.topology.coordinates import AXIS_NAMES, Coord, Shape, format_shape
from tpu_dist.topology.generations import GB, GIB, TERA
from tpu_dist.topology.links import bisection_bandwidth, bisection_links, diameter
from tpu_dist.topology.mesh_layout import MeshLayout
from tpu_dist.topology.rank_map import Numbers, RankMap
from tpu_dist.topology.slice import Slice
from tpu_dist.topology.system import System

Labels = Sequence[str]  # of each chip of a slice, in the order of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of a slice is drawn: positions along x and y, and planes; the rest is counted."""

    x: int = 8
    y: int = 8
    z: int = 4

    def of(self, shape: Shape) -> Shape:
        """Return what is drawn of a slice."""
        return Shape(*(min(a, b) for a, b in zip((self.x, self.y, self.z), shape, strict=True)))


EVERYTHING = Extent(x=10**6, y=10**6, z=10**6)


def describe_system(system: System) -> list[str]:
    """Return the figures of a system, a line for each."""
    slice_ = system.slice
    generation = slice_.generation
    counts = ", ".join(
        f"{count} {thing}{'' if count == 1 else 's'}"
        for count, thing in (
            (system.num_chips, "chip"),
            (system.num_devices, "device"),
            (system.num_hosts, "host"),
        )
    )
    several = f"{system.num_slices} slices of {slice_} over DCN, " if system.num_slices > 1 else ""
    axes = [
        f"{name} {extent} ({'ring' if wrap else 'line'})"
        for name, extent, wrap in zip(AXIS_NAMES, slice_.shape, slice_.wrap, strict=True)
        if extent > 1
    ]
    grid = "x".join(map(str, slice_.host_grid))
    return [
        f"{system}: {several}{counts}; chips of a host: {grid}",
        f"axes: {', '.join(axes) or 'one chip'}{', twisted' if slice_.twisted else ''}; a link: "
        f"{generation.link_bandwidth / GB:g} GB/s a direction",
        f"bisection of a slice: {bisection_links(slice_)} links, "
        f"{bisection_bandwidth(slice_) / GB:,.0f} GB/s both ways; "
        f"farthest chips: {diameter(slice_)} hops",
        f"in all: {system.num_chips * generation.hbm_bytes / GIB:,.0f} GiB HBM, "
        f"{system.num_chips * generation.peak_bf16_flops / TERA:,.0f} bf16 TFLOP/s",
    ]


def rank_labels(rank_map: RankMap, slice_index: int = 0) -> list[str]:
    """Return each chip's ranks: ``6,7`` where it has two devices."""
    return _by_chip(rank_map.system, rank_map.ranks(), slice_index)


def group_labels(layout: MeshLayout, axis: int, slice_index: int = 0) -> list[str]:
    """Return the groups of a mesh axis that each chip is in; of two devices, both: ``0,1``."""
    groups = np.empty(layout.system.num_devices, np.int64)
    for number, members in enumerate(layout.groups(axis)):
        groups[members] = number
    return _by_chip(layout.system, groups, slice_index)


def draw_slice(slice_: Slice, labels: Labels, extent: Extent | None = None) -> list[str]:
    """Return the planes of a slice: x down, y to the right, a box around the chips of each host."""
    shown = (extent or Extent()).of(slice_.shape)
    width = max(
        len(labels[_index(slice_, Coord(x, y, z))])
        for x in range(shown.x)
        for y in range(shown.y)
        for z in range(shown.z)
    )
    lines = []
    for z in range(shown.z):
        if slice_.shape.z > 1:
            lines.append(f"z = {z}")
        lines += _draw_plane(slice_, labels, shown, z, width)
    left_out = slice_.num_chips - shown.volume
    if left_out:
        lines.append(f"... and {left_out} chips more of {format_shape(slice_.shape)}")
    return lines


def _draw_plane(slice_: Slice, labels: Labels, shown: Shape, z: int, width: int) -> list[str]:
    margin = len(f"x={shown.x - 1} ")
    header = "".join(f" {f'y={y}':^{width + 2}}" for y in range(shown.y))
    lines = [(" " * margin + header).rstrip()]
    for x in range(shown.x):
        if x % slice_.host_grid.x == 0:
            lines.append(" " * margin + _host_border(slice_, shown, Coord(x, 0, z), width))
        row = "".join(
            f"{_side(slice_, y)}{labels[_index(slice_, Coord(x, y, z))]:^{width + 2}}"
            for y in range(shown.y)
        )
        lines.append(f"{f'x={x} ':>{margin}}{row}{_side(slice_, shown.y)}")
    lines.append(" " * margin + _border(slice_, shown, width))
    return lines


def _host_border(slice_: Slice, shown: Shape, first: Coord, width: int) -> str:
    """Return the border above a row of hosts, with their numbers in it."""
    line = _border(slice_, shown, width)
    for y in range(0, shown.y, slice_.host_grid.y):
        text = f"host {slice_.host_of(first._replace(y=y))}"
        room = min(slice_.host_grid.y, shown.y - y) * (width + 3) - 1
        at = y * (width + 3) + 1
        text = text if len(text) <= room else text.removeprefix("host ")
        line = line[:at] + text + line[at + len(text) :]
    return line


def _border(slice_: Slice, shown: Shape, width: int) -> str:
    corners = "".join(
        ("+" if y % slice_.host_grid.y == 0 else "-") + "-" * (width + 2) for y in range(shown.y)
    )
    return corners + "+"


def _side(slice_: Slice, y: int) -> str:
    return "|" if y % slice_.host_grid.y == 0 else " "


def _index(slice_: Slice, coord: Coord) -> int:
    return slice_.rank_of(coord) // slice_.generation.devices_per_chip


def _by_chip(system: System, numbers: Numbers, slice_index: int) -> list[str]:
    count = system.slice.num_devices
    mine = numbers[slice_index * count : (slice_index + 1) * count]
    chips = mine.reshape(-1, system.slice.generation.devices_per_chip)
    return [",".join(map(str, dict.fromkeys(chip.tolist()))) for chip in chips]
