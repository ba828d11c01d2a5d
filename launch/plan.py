"""``tpu-launch plan``: what a mesh's collectives will do on a pod, compiled on this machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_dist.launch.console import say
from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.mesh_option import MeshOption, parse_mesh
from tpu_dist.launch.planner_process import PlannerProcess
from tpu_dist.launch.step import StepOption, plan_step, read_sizes, transfers_of

VERBS = ("all_reduce", "all_gather", "reduce_scatter")
FORMS = ("naive", "tuned")
WHOLE = "all"  # the name of the one axis without --mesh

_UNITS: Mapping[str, int] = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LARGEST = 64 << 30  # bytes
_TOKENS, _MFU = "8192", "0.4"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What one run of ``tpu-launch plan`` compiles.

    Attributes:
        topology: a slice, as in ``tpu7x:16x16x32``.
        mesh: laid on it; the whole slice is one axis if None.
        payloads: bytes.
        json_file: where to write the rows.
        plot: where to write a PNG.
        step: a training step to plan for.
        cache: whether results of earlier runs may be used, and are kept for later ones.
    """

    topology: str
    mesh: MeshOption | None = None
    payloads: tuple[int, ...] = (64 << 20,)
    json_file: Path | None = None
    plot: Path | None = None
    step: StepOption | None = None
    cache: bool = True


def build_plan_config(options: Mapping[str, str], *, cache: bool = True) -> PlanConfig:
    """Build the config from the options' texts.

    Raises:
        LaunchError: an option makes no sense.
    """
    mesh, plot, rows = (options.get(name) for name in ("mesh", "plot", "json"))
    if plot is not None and not plot.endswith(".png"):
        raise LaunchError(f"--plot {plot!r}: expected the name of a .png file")
    return PlanConfig(
        topology=options["topology"],
        mesh=None if mesh is None else parse_mesh(mesh),
        payloads=tuple(parse_bytes(part) for part in options.get("payload", "64MiB").split(",")),
        json_file=None if rows is None else Path(rows),
        plot=None if plot is None else Path(plot),
        step=_step_option(options),
        cache=cache,
    )


def _step_option(options: Mapping[str, str]) -> StepOption | None:
    recipe, model = options.get("recipe"), options.get("model")
    if recipe is not None and model is not None:
        raise LaunchError("--recipe and --model exclude each other: give one of them")
    what = recipe or model
    if what is None:
        given = [f"--{name}" for name in ("tokens", "mfu") if name in options]
        if given:
            raise LaunchError(f"{given[0]} is of a step: give --recipe or --model with it")
        return None
    texts = (options.get("tokens", _TOKENS), options.get("mfu", _MFU))
    try:
        tokens, mfu = int(texts[0]), float(texts[1])
    except ValueError as error:
        raise LaunchError(f"--tokens {texts[0]!r} and --mfu {texts[1]!r}: {error}") from None
    return StepOption(model=what, tokens=tokens, mfu=mfu)


def parse_bytes(text: str) -> int:
    """Read a size as in ``64MiB``.

    Raises:
        LaunchError: it is none.
    """
    match = re.fullmatch(r"\s*([1-9]\d{0,11})\s*(B|KiB|MiB|GiB)\s*", text)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < size <= _LARGEST:
        raise LaunchError(
            f"--payload {text!r}: expected a size of at most {_LARGEST >> 30}GiB, as in 64MiB"
        )
    return size


def run_plan(config: PlanConfig) -> int:
    """Compile, print the table, write what was asked for, and return the exit status.

    Raises:
        TopologyError: there is no such slice, or the mesh does not fit.
        LaunchError: it cannot be planned for, or a file cannot be written.
    """
    from tpu_dist.launch.plan_report import plot_rows, show_rows, show_step, show_summary
    from tpu_dist.topology.mesh_search import lay_out_mesh
    from tpu_dist.topology.system import System

    system = System.parse(config.topology)
    mesh = config.mesh or MeshOption(names=(WHOLE,), sizes=(system.num_devices,))
    lay_out_mesh(system, mesh.sizes, names=mesh.names)  # refuses what does not fit, at once
    units = () if config.step is None else read_sizes(config.step.model)
    if units:
        transfers_of(mesh, units)  # likewise
    start = time.monotonic()
    step = None
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    with PlannerProcess(str(system), sizes, cache=config.cache) as planner:
        rows = list(_with_progress(planner, _cases(mesh, config.payloads), mesh))
        if config.step is not None:
            step = plan_step(system, mesh, config.step, units, planner.row)
    show_rows(system, planner.axes, rows)
    show_summary(rows, seconds=time.monotonic() - start, num_known=planner.num_known)
    document = {"topology": str(system), "devices": system.num_devices, "rows": _sound(rows)}
    if step is not None:
        show_step(step)
        document["step"] = step
    for note in planner.notes:
        say(f"warning: {note}")
    if config.json_file is not None:
        _write(config.json_file, json.dumps(document, indent=1) + "\n")
    if config.plot is not None:
        plot_rows(config.plot, str(system), _sound(rows))
    return 1 if len(_sound(rows)) < len(rows) else 0


def _cases(mesh: MeshOption, payloads: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"axis": axis, "verb": verb, "form": form, "bytes": payload}
        for axis in range(len(mesh.names))
        for payload in payloads
        for verb in VERBS
        for form in FORMS
    ]


def _with_progress(
    planner: PlannerProcess, cases: Sequence[dict[str, Any]], mesh: MeshOption
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case; a failed one has ``failed`` and what the case is."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            name = mesh.names[case["axis"]]
            progress.update(task, description=f"{name} {case['verb']} {case['form']}")
            row = planner.row(case)
            if "failed" in row:
                row = {**case, "axis": name, "failed": row["failed"]}
            yield row
            progress.advance(task)


def _sound(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "failed" not in row]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"--json {str(path)!r}: {error.strerror or error}") from error
