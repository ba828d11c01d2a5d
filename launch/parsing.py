"""Command lines by typer, for all commands alike: what they share, and errors as LaunchError."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.refusals import refusal

# typer has its own click since 0.2x and the user's before: this reaches the class in either.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def dashes(name: str) -> str:
    """Return an option's name with dashes: torchrun takes --nproc_per_node too."""
    return name.replace("_", "-")


def new_app() -> typer.Typer:
    """Return an app for one command."""
    return typer.Typer(add_completion=False, rich_markup_mode="rich")


def parse_arguments(app: typer.Typer, argv: Sequence[str], name: str) -> object:
    """Parse the arguments of a command.

    Args:
        app: with the one command.
        argv: its arguments.
        name: of the command, as typed.

    Returns:
        What the command's function returns, or the exit status where --help has been shown.

    Raises:
        LaunchError: an option that is unknown, not available or without its value.
    """
    command = typer.main.get_command(app)
    try:
        return command.main(list(argv), prog_name=name, standalone_mode=False)
    except _UsageError as error:
        option = getattr(error, "option_name", None)
        why = refusal(option) if option else None
        message = f"{option}: {why}" if why else error.format_message()  # type: ignore[attr-defined]
        raise LaunchError(f"{message} (see {name} --help)") from error
