"""What a run says while it trains: one line a logged step, and the same as JSON.

    step   20/200  loss 5.1034  lr 3.00e-03  grad norm 0.912  9,120 tokens/s  0:41 left
        ms/step: all_gather 12.1, reduce_scatter 8.4

(one line; the second part only where the process group times its verbs).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from tpu_dist.recipes.verbs import VerbLap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One logged step.

    Attributes:
        step: 1 for the first.
        num_steps: Steps in the run.
        loss: Of this step: mean over its tokens on all processes, before the update.
        learning_rate: Of this step's update.
        gradient_norm: Of this step, over all parameters, before clipping.
        elapsed: Since the last logged step, or the start.
        num_steps_elapsed: Steps in that time.
        num_tokens_elapsed: Tokens trained on in that time, on all processes.
        verbs: Collective verbs of this process in that time; None where they are not timed.
    """

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    elapsed: timedelta
    num_steps_elapsed: int
    num_tokens_elapsed: int
    verbs: Mapping[str, VerbLap] | None

    @property
    def tokens_per_second(self) -> float:
        """Since the last logged step, over all processes."""
        return self.num_tokens_elapsed / self.elapsed.total_seconds()

    @property
    def left(self) -> timedelta:
        """Until the last step, at the pace since the last logged step."""
        return self.elapsed / self.num_steps_elapsed * (self.num_steps - self.step)

    @property
    def verb_milliseconds(self) -> Mapping[str, float] | None:
        """Milliseconds a step that this process spent in each verb."""
        if self.verbs is None:
            return None
        return {
            verb: lap.seconds * 1e3 / self.num_steps_elapsed for verb, lap in self.verbs.items()
        }


class Progress:
    """Writes the lines of a run; on other ranks than 0, nothing.

    Args:
        console: Where the lines go. Coloured on a terminal, plain and unwrapped anywhere else.
        json_file: Where the JSON lines go, if anywhere.
        rank: This process.
    """

    def __init__(self, console: Console, *, json_file: TextIO | None, rank: int) -> None:
        self._console = console
        self._json_file = json_file
        self._rank = rank

    def step(self, report: StepReport) -> None:
        """Report a logged step."""
        self._print(step_line(report))
        self._write_json(
            {
                "event": "step",
                "step": report.step,
                "loss": report.loss,
                "learning_rate": report.learning_rate,
                "gradient_norm": report.gradient_norm,
                "tokens_per_second": report.tokens_per_second,
                "seconds_per_step": report.elapsed.total_seconds() / report.num_steps_elapsed,
                "verb_milliseconds_per_step": report.verb_milliseconds,
            }
        )

    def validation(self, *, step: int, loss: float, perplexity: float, num_tokens: int) -> None:
        """Report the evaluation after the last step."""
        text = Text.assemble(
            "validation  ",
            ("loss ", "dim"),
            (f"{loss:.4f}", "bold"),
            ("  perplexity ", "dim"),
            (f"{perplexity:.1f}", "bold"),
            (f"  on {num_tokens:,} held-out tokens", "dim"),
        )
        self._print(text)
        self._write_json(
            {"event": "validation", "step": step, "loss": loss, "perplexity": perplexity}
        )

    def note(self, message: str) -> None:
        """Say something once, such as what is about to be trained."""
        self._print(Text(message))

    def sample(self, prompt: str, continuation: str) -> None:
        """Show what the model writes."""
        self._print(Text.assemble("sample:\n", (prompt, "bold"), continuation))

    def _print(self, text: Text) -> None:
        if self._rank:
            return
        self._console.print(text, soft_wrap=True, highlight=False)
        self._console.file.flush()

    def _write_json(self, record: Mapping[str, object]) -> None:
        if self._rank or self._json_file is None:
            return
        self._json_file.write(json.dumps(record) + "\n")
        self._json_file.flush()


def step_line(report: StepReport) -> Text:
    """The progress line, styled; its ``plain`` is the line in a log."""
    width = len(str(report.num_steps))
    left = timedelta(seconds=round(report.left.total_seconds()))
    line = Text.assemble(
        ("step ", "dim"),
        f"{report.step:>{width}}/{report.num_steps}",
        ("  loss ", "dim"),
        (f"{report.loss:.4f}", "bold"),
        ("  lr ", "dim"),
        f"{report.learning_rate:.2e}",
        ("  grad norm ", "dim"),
        f"{report.gradient_norm:.3f}",
        f"  {report.tokens_per_second:,.0f}",
        (" tokens/s", "dim"),
        f"  {str(left).removeprefix('0:')}",
        (" left", "dim"),
    )
    milliseconds = report.verb_milliseconds
    if milliseconds:
        verbs = ", ".join(f"{verb} {value:.1f}" for verb, value in milliseconds.items())
        line.append("  ms/step: ", "dim").append(verbs)
    return line


def open_json(path: Path | None, *, append: bool) -> AbstractContextManager[TextIO | None]:
    """Open the file for JSON lines, if any; a resumed run adds to it, a new one starts it.

    Raises:
        ValueError: It cannot be written.
    """
    if path is None:
        return nullcontext()
    try:
        return path.open("a" if append else "w", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--json {path} cannot be written: {error.strerror}. Name a file in a directory "
            f"that exists and permits writing."
        ) from error
