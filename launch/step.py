"""What FSDP moves in one training step, and what share of the step that takes.

A step gathers each unit's parameters twice, for the forward and the backward pass (FSDP2's
reshard_after_forward), and scatters its gradients once, over the axes that shard; the gradients of
a shard are all-reduced over the axes that replicate (HSDP). Axes that split a unit's own tensors
(tp) leave each rank a part of it. Arithmetic: 6 FLOP a parameter and token (Kaplan et al., "Scaling
Laws for Neural Language Models", 2020, table 1), attention left out; at an MFU of the peak they
take the step's time. A share above 1 says that no such MFU can be had, and one below that all of
it can be hidden behind the arithmetic, as far as the links go.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tpu_dist.launch.errors import LaunchError
from tpu_dist.launch.mesh_option import MeshOption
from tpu_dist.topology.system import System

_MODULE = "tpu_dist.recipes.parameter_sizes"  # another floor: it is run, and not imported
_DEADLINE = timedelta(minutes=2)

ITEM_BYTES = 2  # bfloat16, of parameters as gathered and of gradients as reduced
_FLOP = 6  # a parameter and token

SHARD, REPLICATE, SPLIT = "shard", "replicate", "split"

# What the axes of a mesh do to parameters, by the names that people give them.
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("fsdp", "dp_shard", "data", "all"), SHARD),
    **dict.fromkeys(("dp", "dp_replicate", "ddp", "hsdp", "dcn"), REPLICATE),
    **dict.fromkeys(("tp", "model"), SPLIT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOption:
    """What a step is of.

    Attributes:
        model: a recipe, or ``file.py:function``.
        tokens: of a step, for each device of the job.
        mfu: what part of its peak in bfloat16 a device reaches over the whole step.
    """

    model: str
    tokens: int
    mfu: float

    def __post_init__(self) -> None:
        if not 0 < self.mfu <= 1:
            raise LaunchError(f"--mfu {self.mfu:g}: expected a part of 1, as in 0.4")
        if self.tokens < 1:
            raise LaunchError(f"--tokens {self.tokens}: expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One kind of collective of a step.

    Attributes:
        axis: of the mesh, by its place.
        verb: as in ``all_gather``.
        bytes: of one payload.
        times: how often in a step.
    """

    axis: int
    verb: str
    bytes: int
    times: int


def read_sizes(model: str) -> tuple[int, ...]:
    """Return the elements of each FSDP unit of a model. Runs its code, in a process of its own.

    Raises:
        LaunchError: it has none.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, model],
            capture_output=True,
            text=True,
            timeout=_DEADLINE.total_seconds(),
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{model}: no parameters within {_DEADLINE}") from None
    if not done.stdout:
        raise LaunchError(
            f"{model}: the process ended with {done.returncode}: {done.stderr[-400:]}"
        )
    found = json.loads(done.stdout)
    if "error" in found:
        raise LaunchError(f"{model}: {found['error']}")
    sizes = tuple(size for size in (*found["units"], found["root"]) if size)
    if not sizes:
        raise LaunchError(f"{model}: the model has no parameters")
    return sizes


def transfers_of(mesh: MeshOption, sizes: Sequence[int]) -> tuple[Transfer, ...]:
    """Return what one rank takes part in during a step.

    Args:
        mesh: its axes by their usual names.
        sizes: elements of each unit.

    Raises:
        LaunchError: nobody knows what an axis does to parameters, or none shards them.
    """
    unknown = [name for name in mesh.names if name not in ROLES]
    if unknown:
        raise LaunchError(
            f"what the axis {unknown[0]!r} does to parameters is not known; known are "
            f"{', '.join(ROLES)}"
        )
    axes = {
        role: [axis for axis, name in enumerate(mesh.names) if ROLES[name] == role]
        for role in (SHARD, REPLICATE, SPLIT)
    }
    if len(axes[SHARD]) != 1:
        names = ", ".join(name for name, role in ROLES.items() if role == SHARD)
        raise LaunchError(f"a step needs one axis that shards parameters: one of {names}")
    (shard,) = axes[SHARD]
    parts = 1
    for axis in axes[SPLIT]:
        parts *= mesh.sizes[axis]
    found: list[Transfer] = []
    for size, times in Counter(-(-size // parts) for size in sizes).items():
        num_bytes = size * ITEM_BYTES
        if mesh.sizes[shard] > 1:
            found.append(Transfer(axis=shard, verb="all_gather", bytes=num_bytes, times=2 * times))
            found.append(Transfer(axis=shard, verb="reduce_scatter", bytes=num_bytes, times=times))
        piece = -(-num_bytes // mesh.sizes[shard])
        found += [
            Transfer(axis=axis, verb="all_reduce", bytes=piece, times=times)
            for axis in axes[REPLICATE]
            if mesh.sizes[axis] > 1
        ]
    return tuple(found)


def plan_step(
    system: System,
    mesh: MeshOption,
    option: StepOption,
    sizes: Sequence[int],
    row: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what a step moves and how long that takes, as written to JSON.

    Args:
        system: that it runs on.
        mesh: laid on it.
        option: what the step is of.
        sizes: elements of each unit.
        row: compiles a case and returns its row, as `PlannerProcess.row`.
    """
    generation = system.slice.generation
    peak = generation.peak_bf16_flops / generation.devices_per_chip
    step_us = _FLOP * sum(sizes) * option.tokens / (option.mfu * peak) * 1e6
    step: dict[str, Any] = {
        "model": option.model,
        "parameters": sum(sizes),
        "tokens_per_device": option.tokens,
        "mfu": option.mfu,
        "step_us": round(step_us, 3),
        "transfers": [],
    }
    for transfer in transfers_of(mesh, sizes):
        moved: dict[str, Any] = {
            "axis": mesh.names[transfer.axis],
            "verb": transfer.verb,
            "bytes": transfer.bytes,
            "times": transfer.times,
        }
        for form in ("naive", "tuned"):
            case = {"axis": transfer.axis, "verb": transfer.verb, "form": form}
            found = row({**case, "bytes": transfer.bytes})
            if "failed" in found:
                moved[f"{form}_failed"] = found["failed"]
            else:
                moved[f"{form}_us"] = round(found["modelled_us"] * transfer.times, 3)
        step["transfers"].append(moved)
    for form in ("naive", "tuned"):
        times = [moved.get(f"{form}_us") for moved in step["transfers"]]
        whole = None if None in times else round(sum(times), 3)
        step[f"{form}_us"] = whole
        step[f"{form}_share"] = None if whole is None else round(whole / step_us, 4)
    return step
