"""The rows of ``tpu-launch plan`` as a table and as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_dist.launch.errors import LaunchError

if TYPE_CHECKING:
    from tpu_dist.topology.system import System

Row = Mapping[str, Any]

_COLOURS: Mapping[str, str] = {"naive": "tab:grey", "tuned": "tab:green"}


def show_rows(system: System, axes: Sequence[str], rows: Sequence[Row]) -> None:
    """Print what is planned for, and a table of the rows; and failed ones below it."""
    from rich.console import Console
    from rich.table import Table

    from tpu_dist.topology.drawing import describe_system

    console = Console(highlight=False)
    console.print("\n".join(describe_system(system)), soft_wrap=True, markup=False)
    for axis in axes:
        console.print(f"mesh: {axis}", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (
        ("axis", "left"),
        ("verb", "left"),
        ("form", "left"),
        ("payload", "right"),
        ("links", "right"),
        ("modelled", "right"),
        ("ideal", "right"),
        ("efficiency", "right"),
        ("temporary", "right"),
        ("compile", "right"),
        ("algorithm", "left"),
    ):
        overflow = {"overflow": "fold"} if name == "algorithm" else {"no_wrap": True}
        table.add_column(name, justify=justify, **overflow)  # type: ignore[arg-type]
    for row in rows:
        if "failed" not in row:
            table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        if "failed" in row:
            case = f"{row['axis']} {row['verb']} {row['form']} {_size(row['bytes'])}"
            console.print(f"failed: {case}: {row['failed']}", soft_wrap=True, markup=False)


def show_summary(rows: Sequence[Row], *, seconds: float, num_known: int) -> None:
    """Print what the figures are."""
    known = f", {num_known} of them known from earlier" if num_known else ""
    print(
        f"{len(rows)} programs in {seconds:.0f} s{known}. Times are modelled from the links that "
        f"the compiled programs use; none was measured on a chip, and latency is not in them."
    )


def show_step(step: Mapping[str, Any]) -> None:
    """Print what a training step moves, and what share of it that takes."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"\na step of {step['model']}: {step['parameters']:,} parameters, "
        f"{step['tokens_per_device']:,} tokens a device: {step['step_us']:,.0f} us at an MFU of "
        f"{step['mfu']:g}",
        soft_wrap=True,
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("axis", "verb", "payload", "times", "naive", "tuned"):
        table.add_column(name, justify="left" if name in ("axis", "verb") else "right")
    for moved in step["transfers"]:
        payload = (_size(moved["bytes"]), str(moved["times"]))
        times = (_microseconds(moved.get(f"{form}_us")) for form in ("naive", "tuned"))
        table.add_row(moved["axis"], moved["verb"], *payload, *times)
    for text in ("us", "share"):
        cells = [step[f"{form}_{text}"] for form in ("naive", "tuned")]
        show = _microseconds if text == "us" else _percent
        name = "in all" if text == "us" else "of the step"
        table.add_row(name, "", "", "", *(show(cell) for cell in cells))
    console.print(table)


def _microseconds(value: float | None) -> str:
    return "failed" if value is None else f"{value:,.0f} us"


def _percent(value: float | None) -> str:
    return "failed" if value is None else f"{value:.1%}"


def plot_rows(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Write a PNG of the efficiency of each axis and verb, naive beside tuned.

    Raises:
        LaunchError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LaunchError("--plot needs matplotlib: pip install 'tpu-dist[plot]'") from None
    names = list(dict.fromkeys(_case(row) for row in rows))
    figure = Figure(figsize=(3 + 0.9 * len(names), 4.2), layout="constrained")
    panel = figure.add_subplot()
    for shift, form in ((-0.2, "naive"), (0.2, "tuned")):
        mine = [row for row in rows if row["form"] == form]
        panel.bar(
            [names.index(_case(row)) + shift for row in mine],
            [row["efficiency"] for row in mine],
            width=0.38,
            label=form,
            color=_COLOURS[form],
        )
    panel.set_xticks(range(len(names)), names, fontsize=8)
    panel.axhline(1.0, color="black", lw=0.8, ls=":")
    panel.set_ylabel("efficiency: ideal / modelled")
    panel.set_title(title)
    panel.legend()
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise LaunchError(f"--plot {str(path)!r}: {error.strerror or error}") from error


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row["axis"],
        row["verb"],
        row["form"],
        _size(row["bytes"]),
        f"{row['links_used']:g}",
        f"{row['modelled_us']:,.0f} us",
        f"{row['ideal_us']:,.0f} us",
        f"{row['efficiency']:.3f}",
        _size(row["temp_bytes"]),
        f"{row['compile_s']:.1f} s",
        row["algorithm"],
    )


def _case(row: Row) -> str:
    return f"{row['axis']}\n{row['verb']}\n{_size(row['bytes'])}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.4g} MiB"
