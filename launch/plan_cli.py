"""The command line of ``tpu-launch plan``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tpu_dist.launch.console import NAME
from tpu_dist.launch.parsing import dashes, new_app, parse_arguments
from tpu_dist.launch.plan import PlanConfig, build_plan_config, run_plan


def run_plan_command(argv: Sequence[str]) -> int:
    """Run ``tpu-launch plan`` and return its exit status: 1 if a program could not be compiled.

    Raises:
        LaunchError: an option makes no sense.
        TopologyError: there is no such slice.

    Example:
        >>> run_plan_command(["--topology", "tpu7x:4x4x4"])  # doctest: +SKIP
        0
    """
    result = parse_arguments(_app, argv, f"{NAME} plan")
    if isinstance(result, PlanConfig):
        return run_plan(result)
    return int(result) if isinstance(result, int) else 0


_app = new_app()


@_app.command(
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
def _plan(
    topology: Annotated[
        str, typer.Option(metavar="NAME", help="One slice, as in tpu7x:16x16x32 or v5p-128.")
    ],
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="A mesh to lay on it, outermost first: dp=128,fsdp=16,tp=8. "
            "Default: the whole slice as one axis.",
        ),
    ] = None,
    payload: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of one collective; several as in 64MiB,512MiB. Default: 64MiB."
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the rows there.")] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help="Draw efficiencies there; needs matplotlib."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan a training step of a recipe's model: kjv."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Plan a step of the model that a function returns, made on torch's meta device.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Of a step, for each device. Default: 8192."),
    ] = None,
    mfu: Annotated[
        str | None,
        typer.Option(metavar="PART", help="Of the peak that a step reaches. Default: 0.4."),
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Compile everything, and keep no results for later."),
    ] = False,
) -> PlanConfig:
    """Compile a mesh's collectives for a slice, here and without a TPU, and say what they will do.

    Needs libtpu's compiler: pip install 'tpu-dist[tpu]'.
    """
    given = {
        "topology": topology,
        "mesh": mesh,
        "payload": payload,
        "json": json,
        "plot": plot,
        "recipe": recipe,
        "model": model,
        "tokens": tokens,
        "mfu": mfu,
    }
    texts = {name: text for name, text in given.items() if text is not None}
    return build_plan_config(texts, cache=not no_cache)
