"""The command line of ``tpu-launch topo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from tpu_dist.launch.console import NAME
from tpu_dist.launch.parsing import dashes, new_app, parse_arguments
from tpu_dist.launch.topo import ORDERS, TopoConfig, build_topo_config, show_topology


def run_topo(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``tpu-launch topo`` and return its exit status.

    Raises:
        LaunchError: an option makes no sense.
        TopologyError: there is no such topology.

    Example:
        >>> run_topo(["--topology", "v6e:2x4", "--mesh", "dp=2,tp=4"], {})  # doctest: +SKIP
        0
    """
    result = parse_arguments(_app, argv, f"{NAME} topo")
    if isinstance(result, TopoConfig):
        return show_topology(result, environ)
    return int(result) if isinstance(result, int) else 0


_app = new_app()


@_app.command(
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
def _topo(
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A slice as in tpu7x:4x4x8 or v5p-128, and *4 for four of them. "
            "Default: the slice that this host is in.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="A mesh to lay on it, outermost first: dp=16,tp=8."),
    ] = None,
    axis: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Draw the groups of this mesh axis instead of ranks."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER",
            help=f"How ranks are numbered: one of {', '.join(ORDERS)}. Default: hosts, as "
            "torchrun does; row-major is the compiler's; with mesh, the plain mesh of the ranks "
            "is the one that is laid out.",
        ),
    ] = None,
    chips_per_host: Annotated[
        str | None,
        typer.Option(metavar="N", help="4 or 8, for v5e and v6e. Default: the usual."),
    ] = None,
    slice_index: Annotated[
        str | None, typer.Option("--slice", metavar="N", help="Which slice to draw. Default: 0.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Draw every chip of a large slice.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw it there as well; needs matplotlib."),
    ] = None,
) -> TopoConfig:
    """Draw a slice: its chips, hosts and ranks, or the groups of a mesh axis."""
    given = {
        "topology": topology,
        "mesh": mesh,
        "axis": axis,
        "order": order,
        "chips-per-host": chips_per_host,
        "slice": slice_index,
        "plot": plot,
    }
    options = {name: text for name, text in given.items() if text is not None}
    return build_topo_config(options, everything=everything)
