import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from tpu_dist.recipes.progress import Progress, StepReport, open_json, step_line
from tpu_dist.recipes.verbs import VerbClock, VerbLap

REPORT = StepReport(
    step=20,
    num_steps=250,
    loss=5.10341,
    learning_rate=3e-3,
    gradient_norm=0.9121,
    elapsed=timedelta(seconds=2),
    num_steps_elapsed=10,
    num_tokens_elapsed=20480,
    verbs={
        "all_gather": VerbLap(calls=50, seconds=0.121),
        "reduce_scatter": VerbLap(calls=50, seconds=0.0841),
    },
)


def test_the_line_names_what_it_says() -> None:
    assert step_line(REPORT).plain == (
        "step  20/250  loss 5.1034  lr 3.00e-03  grad norm 0.912  10,240 tokens/s  00:46 left"
        "  ms/step: all_gather 12.1, reduce_scatter 8.4"
    )


def test_a_group_that_times_no_verbs_has_a_shorter_line() -> None:
    assert step_line(replace(REPORT, verbs=None)).plain.endswith(" left")


def written(*, terminal: bool, rank: int = 0) -> tuple[str, str]:
    out, json_file = io.StringIO(), io.StringIO()
    colours = "standard" if terminal else None
    console = Console(file=out, force_terminal=terminal, width=40, color_system=colours)
    progress = Progress(console, json_file=json_file, rank=rank)
    progress.step(REPORT)
    progress.validation(step=250, loss=4.5, perplexity=90.02, num_tokens=54321)
    progress.sample("In the [bold]", " beginning")
    return out.getvalue(), json_file.getvalue()


def test_a_log_gets_whole_plain_lines() -> None:
    out, _ = written(terminal=False)
    lines = out.splitlines()
    assert lines[0] == step_line(REPORT).plain
    assert lines[1] == "validation  loss 4.5000  perplexity 90.0  on 54,321 held-out tokens"
    assert lines[2:] == ["sample:", "In the [bold] beginning"]


def test_a_terminal_gets_the_same_in_colour() -> None:
    out, _ = written(terminal=True)
    assert "\x1b[" in out
    assert "5.1034" in out


def test_the_json_has_an_object_a_logged_step() -> None:
    _, content = written(terminal=False)
    step, validation = map(json.loads, content.splitlines())
    assert step == {
        "event": "step",
        "step": 20,
        "loss": 5.10341,
        "learning_rate": 3e-3,
        "gradient_norm": 0.9121,
        "tokens_per_second": 10240.0,
        "seconds_per_step": 0.2,
        "verb_milliseconds_per_step": {
            "all_gather": pytest.approx(12.1),
            "reduce_scatter": pytest.approx(8.41),
        },
    }
    assert validation == {"event": "validation", "step": 250, "loss": 4.5, "perplexity": 90.02}


def test_other_ranks_say_nothing() -> None:
    assert written(terminal=False, rank=1) == ("", "")


def test_a_new_run_starts_the_json_file_and_a_resumed_one_adds_to_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for append, expected in ((False, "x"), (True, "xx"), (False, "x")):
        with open_json(path, append=append) as file:
            assert file is not None
            file.write("x")
        assert path.read_text() == expected
    with open_json(None, append=False) as file:
        assert file is None


def test_a_json_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--json .* cannot be written"):
        open_json(tmp_path / "missing" / "steps.jsonl", append=False)


@dataclass
class Growing:
    """As a process group may report: objects that it goes on adding to."""

    calls: int
    seconds: float


class TimedGroup:
    def __init__(self) -> None:
        self.times = {"allreduce": Growing(2, 1.0)}

    def verb_times(self) -> Mapping[str, Growing]:
        return self.times


def test_a_lap_is_what_was_added_since_the_last() -> None:
    group = TimedGroup()
    clock = VerbClock(group)
    group.times["allreduce"].calls += 3
    group.times["allreduce"].seconds += 0.5
    group.times["broadcast"] = Growing(1, 2.0)
    lap = clock.lap()
    assert lap == {
        "broadcast": VerbLap(calls=1, seconds=2.0),
        "allreduce": VerbLap(calls=3, seconds=0.5),
    }
    assert lap is not None
    assert list(lap) == ["broadcast", "allreduce"]
    assert clock.lap() == {}


def test_a_group_without_verb_times_has_no_laps() -> None:
    assert VerbClock(object()).lap() is None
