"""What the launcher itself says on the terminal: on stderr, as stdout belongs to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

NAME = "tpu-launch"


def say(message: str) -> None:
    """Print one message of the launcher on stderr, marked as its own."""
    from rich.text import Text

    show(Text.assemble((f"{NAME}: ", "bold"), message))


def show(text: Text) -> None:
    """Print styled text on stderr: in colour on a terminal, never re-wrapped (paths stay whole)."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
