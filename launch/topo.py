"""``tpu-launch topo``: draws a slice, its hosts and ranks, and what the axes of a mesh join."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.mesh_option import MeshOption, parse_mesh

if TYPE_CHECKING:
    from tpu_dist.topology.mesh_layout import MeshLayout
    from tpu_dist.topology.rank_map import RankMap
    from tpu_dist.topology.system import System

HOSTS = "hosts"
ROW_MAJOR = "row-major"
MESH = "mesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoConfig:
    """What one run of ``tpu-launch topo`` draws.

    Attributes:
        topology: a name as in ``tpu7x:4x4x8*2``; None is the slice that this host is in.
        chips_per_host: where hosts of several kinds exist; None is the usual one.
        mesh: a mesh to lay on it.
        axis: the mesh axis whose groups are drawn, instead of ranks.
        order: in which order ranks are numbered: a key of ``ORDERS``.
        slice_index: which of several slices is drawn.
        everything: whether all chips are drawn, and not the first of a large slice alone.
        plot: where to write a PNG.
    """

    topology: str | None = None
    chips_per_host: int | None = None
    mesh: MeshOption | None = None
    axis: str | None = None
    order: str = HOSTS
    slice_index: int = 0
    everything: bool = False
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise LaunchError(f"--order {self.order!r}: expected one of {', '.join(ORDERS)}")
        if self.mesh is None and (self.axis is not None or self.order == MESH):
            option = "--axis" if self.axis is not None else f"--order {MESH}"
            raise LaunchError(f"{option} needs a mesh: give --mesh dp=16,tp=8 too")


def build_topo_config(options: Mapping[str, str], *, everything: bool) -> TopoConfig:
    """Build the config from the options' texts.

    Raises:
        LaunchError: an option makes no sense.
    """
    mesh = options.get("mesh")
    plot = options.get("plot")
    if plot is not None and not plot.endswith(".png"):
        raise LaunchError(f"--plot {plot!r}: expected the name of a .png file")
    return TopoConfig(
        topology=options.get("topology"),
        chips_per_host=_number(options, "chips-per-host"),
        mesh=None if mesh is None else parse_mesh(mesh),
        axis=options.get("axis"),
        order=options.get("order", HOSTS),
        slice_index=_number(options, "slice") or 0,
        everything=everything,
        plot=None if plot is None else Path(plot),
    )


def show_topology(config: TopoConfig, environ: Mapping[str, str]) -> int:
    """Print the drawing on stdout, write the PNG if asked for, and return the exit status.

    Raises:
        TopologyError: there is no such topology, or nothing says which this host's is.
        LaunchError: the mesh has no such axis, or the system no such slice.
    """
    from tpu_dist.topology.drawing import (
        EVERYTHING,
        Extent,
        describe_system,
        draw_slice,
        group_labels,
        rank_labels,
    )
    from tpu_dist.topology.mesh_search import lay_out_mesh

    system, found = _system(config, environ)
    if config.slice_index >= system.num_slices:
        raise LaunchError(f"--slice {config.slice_index}: {system} has {system.num_slices}")
    layout = None
    if config.mesh is not None:
        layout = lay_out_mesh(system, config.mesh.sizes, names=config.mesh.names)
    ranks = ORDERS[config.order](system, layout)
    lines = [*found, *describe_system(system)]
    if layout is not None:
        lines += [f"mesh: {axis}" for axis in layout.axes]
    if layout is not None and config.mesh is not None and config.axis is not None:
        axis = config.mesh.axis(config.axis)
        labels = group_labels(layout, axis, config.slice_index)
        lines.append(f"groups of {config.axis}, by chip:")
    else:
        axis = None
        labels = rank_labels(ranks, config.slice_index)
        lines.append(f"ranks, by chip, in the order {config.order!r}:")
    lines += draw_slice(system.slice, labels, EVERYTHING if config.everything else Extent())
    print("\n".join(lines))
    if config.plot is not None:
        from tpu_dist.launch.topo_plot import plot_slice

        title = str(system)
        if layout is not None and axis is not None:
            title += f"\n{layout.axes[axis]}"
        plot_slice(
            config.plot,
            system,
            labels,
            title=title,
            layout=layout,
            axis=axis,
            slice_index=config.slice_index,
        )
        print(f"drawn in {config.plot}")
    return 0


def _system(config: TopoConfig, environ: Mapping[str, str]) -> tuple[System, list[str]]:
    """Return the system, and where it was found if it was not named."""
    from tpu_dist.topology.discovery import discover
    from tpu_dist.topology.system import System

    if config.topology is not None:
        return System.parse(config.topology, chips_per_host=config.chips_per_host), []
    place = discover(environ)
    lines = [f"this is host {place.host} of slice {place.slice_index}, as found:"]
    lines += [f"  {name}: {origin}" for name, origin in place.origins.items()]
    return place.system, lines


def _by_hosts(system: System, layout: MeshLayout | None) -> RankMap:
    from tpu_dist.topology.rank_map import RankMap

    return RankMap.host_major(system)


def _row_major(system: System, layout: MeshLayout | None) -> RankMap:
    from tpu_dist.topology.rank_map import RankMap

    return RankMap.row_major(system)


def _of_mesh(system: System, layout: MeshLayout | None) -> RankMap:
    assert layout is not None, "TopoConfig refuses this order without a mesh"
    return layout.rank_map()


ORDERS: Mapping[str, Callable[[System, MeshLayout | None], RankMap]] = {
    HOSTS: _by_hosts,
    ROW_MAJOR: _row_major,
    MESH: _of_mesh,
}


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise LaunchError(f"--{name} {text!r}: expected a whole number")
    return int(text)
