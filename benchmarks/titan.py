"""Every way to train with TorchTitan: the device against CPU tensors with gloo, as a table.

    python benchmarks/titan.py --list
    python benchmarks/titan.py --only fsdp2 --only tp
    python benchmarks/titan.py --only speed --steps 50
    python benchmarks/titan.py --write docs/recipes.md

Each row trains twice from the same first weights (TorchTitan's seed checkpoint, made on the CPU),
on the same text: once on "tpu" with tpu_dist, once on the CPU with gloo, one after the other.
Losses of all steps must agree. The rows are small, to be many; the row `speed`, which is run only
when it is asked for, is the debug model at its own size. Results are kept in --directory; a row
that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEVICES = ("tpu", "cpu")
SECONDS = 1200
MARK = re.compile(r"(<!-- titan matrix -->\n).*?(<!-- end -->)", re.DOTALL)

SMALL = (
    *("--training.seq_len", "64", "--training.local_batch_size", "4"),
    *("--training.mixed_precision_param", "float32", "--training.steps", "{steps}"),
    *("--checkpoint.enable", "--checkpoint.initial_load_path", "{seed}/checkpoint/step-0"),
    *("--validation.seq_len", "64"),
)
LOAD_ONLY = ("--checkpoint.load_only",)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train.

    Attributes:
        name: for --only.
        feature: what it is.
        ranks: how many processes.
        arguments: TorchTitan's.
        config: of the recipe.
        tolerance: how far the losses may be apart, relatively.
        then: arguments of a second run in the same folder, that goes on from its checkpoint.
        then_ranks: its processes.
        unasked: whether it is run without --only.
        oracle: arguments of the run on gloo, where torch has no such feature for CPU tensors.
        oracle_ranks: its processes.
    """

    name: str
    feature: str
    ranks: int = 2
    arguments: str = ""
    config: str = "llama3_debug"
    tolerance: float = 2e-4
    then: str | None = None
    then_ranks: int = 2
    unasked: bool = True
    oracle: str | None = None
    oracle_ranks: int = 1


DEGREE = "--parallelism.{}_degree"
SHARD, REPLICATE = DEGREE.format("data_parallel_shard"), DEGREE.format("data_parallel_replicate")
TP, CP = DEGREE.format("tensor_parallel"), DEGREE.format("context_parallel")
PP, EP = DEGREE.format("pipeline_parallel"), DEGREE.format("expert_parallel")
SAVING = "--checkpoint.interval {half} --checkpoint.no-last-save-model-only"
GOING_ON = f"{SAVING} --checkpoint.exclude_from_loading dataloader"
# As many tokens for each expert: else every step sends others, and compiles programs for them.
BALANCED = "--debug.moe_force_load_balance"
BF16 = "--training.mixed_precision_param bfloat16"

ROWS = (
    Row(name="fsdp2", feature="FSDP2"),
    Row(name="fsdp2-bf16", feature="FSDP2, bfloat16", arguments=BF16, tolerance=5e-3),
    Row(name="ddp", feature="DDP", arguments=f"{SHARD} 1 {REPLICATE} 2"),
    Row(name="hsdp", feature="HSDP 2 x 2", ranks=4, arguments=f"{SHARD} 2 {REPLICATE} 2"),
    Row(name="tp", feature="TP 2", arguments=f"{TP} 2"),
    Row(name="fsdp-tp", feature="FSDP2 2 x TP 2", ranks=4, arguments=f"{TP} 2"),
    Row(name="cp", feature="CP 2 (gloo: 1 rank)", arguments=f"{CP} 2", oracle=""),
    Row(name="pp", feature="PP 2, 1F1B", arguments=f"{PP} 2"),
    Row(
        name="pp-interleaved",
        feature="PP 2, interleaved",
        arguments=f"{PP} 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B",
    ),
    Row(
        name="ac-full",
        feature="full activation checkpointing",
        arguments="--activation_checkpoint.mode full",
    ),
    Row(
        name="ac-none",
        feature="no activation checkpointing",
        arguments="--activation_checkpoint.mode none",
    ),
    Row(
        name="accumulation",
        feature="gradient accumulation, 2 passes",
        arguments="--training.global_batch_size 16",
    ),
    Row(
        name="foreach",
        feature="AdamW, foreach",
        arguments="--optimizer.implementation foreach",
    ),
    Row(
        name="deterministic",
        feature="deterministic mode",
        arguments="--debug.deterministic",
    ),
    Row(
        name="validation",
        feature="validation, TensorBoard, profiler",
        arguments="--validation.enable --validation.freq {half} --metrics.enable_tensorboard"
        " --profiling.enable_profiling --profiling.profile_freq {half}",
    ),
    Row(
        name="resume",
        feature="save, resume on 1 rank",
        arguments=f"{SAVING} --training.steps {{half}}",
        then=f"{GOING_ON} --training.global_batch_size 8",
        then_ranks=1,
    ),
    Row(
        name="async-save",
        feature="asynchronous save, resume",
        arguments=f"{SAVING} --checkpoint.async_mode async --training.steps {{half}}",
        then=SAVING,
    ),
    Row(name="qwen3", feature="Qwen 3, FSDP2", config="qwen3_debug"),
    Row(name="deepseek", feature="DeepSeek V3, FSDP2", config="deepseek_v3_debug", tolerance=2e-2),
    Row(
        name="deepseek-ep",
        feature="DeepSeek V3, FSDP2 x EP 2, balanced",
        config="deepseek_v3_debug",
        arguments=f"{EP} 2 {BALANCED}",
        tolerance=2e-2,
    ),
    Row(
        name="qwen3-moe-ep",
        feature="Qwen 3 MoE, FSDP2 x EP 2, balanced",
        config="qwen3_moe_debug",
        arguments=f"{EP} 2 {BALANCED}",
        tolerance=2e-2,
    ),
    Row(
        name="speed",
        feature="FSDP2, bfloat16, sequences of 256",
        arguments=f"--training.seq_len 256 {BF16}",
        tolerance=2e-2,
        unasked=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one device did: losses by step, the median second, the most memory."""

    losses: list[float]
    seconds: float
    peak_bytes: int
    fallbacks: int
    programs_after_second: int


def launch(folder: Path, device: str, ranks: int, config: str, arguments: list[str]) -> None:
    """Train; raises with the end of its output where that fails."""
    command = [
        *(sys.executable, "-m", "tpu_dist.launch", "--nproc-per-node", str(ranks)),
        *("-m", "tpu_dist.recipes.titan", "--config", config, "--device", device),
        *("--job.dump_folder", str(folder), *arguments),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")


def first_weights(directory: Path, config: str) -> Path:
    """Have the seed checkpoint of a configuration."""
    folder = directory / f"seed-{config}"
    if not (folder / "checkpoint/step-0/.metadata").exists():
        making = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
        launch(folder, "cpu", 1, config, making)
    return folder


def train(directory: Path, row: Row, device: str, steps: int) -> Outcome:
    """Train one row on one device."""
    folder = Path(tempfile.mkdtemp(prefix=f"{row.name}-{device}-", dir=directory))
    seed = first_weights(directory, row.config)
    saves = row.then is not None

    def filled(arguments: str) -> list[str]:
        every = [*SMALL, *(() if saves else LOAD_ONLY), *arguments.split()]
        return [a.format(steps=steps, half=steps // 2, seed=seed) for a in every]

    arguments, ranks = row.arguments, row.ranks
    if device == "cpu" and row.oracle is not None:
        arguments, ranks = row.oracle, row.oracle_ranks
    launch(folder, device, ranks, row.config, filled(arguments))
    if row.then is not None:
        launch(folder, device, row.then_ranks, row.config, filled(row.then))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "loss" in line]
    if [line["step"] for line in taken] != list(range(1, steps + 1)):
        raise RuntimeError(f"{row.name} on {device}: steps {[line['step'] for line in taken]}")
    counted = [line.get("programs", 0) for line in taken[: steps // 2 if saves else steps]]
    return Outcome(
        losses=[line["loss"] for line in taken]
        + [line["validation_loss"] for line in lines if "validation_loss" in line],
        seconds=statistics.median(line["seconds_per_step"] for line in taken[2:]),
        peak_bytes=max(line["peak_bytes"] for line in taken),
        fallbacks=max(line.get("fallbacks", 0) for line in taken),
        programs_after_second=counted[-1] - counted[1],
    )


def apart(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def run(directory: Path, row: Row, steps: int) -> dict[str, Any]:
    """Train one row on both devices, unless that is known; return what came of it."""
    kept = directory / f"{row.name}-{steps}.json"
    if not kept.exists():
        found: dict[str, Any] = {}
        for device in DEVICES:
            found[device] = asdict(train(directory, row, device, steps))
        found["apart"] = apart(found["tpu"]["losses"], found["cpu"]["losses"])
        kept.write_text(json.dumps(found))
    result: dict[str, Any] = json.loads(kept.read_text())
    return result


HEADER = (
    "| feature | config | ranks | steps | loss | gloo's | apart | s/step | gloo's | peak "
    "| programs after step 2 |\n" + "| --- " * 11 + "|\n"
)


def line(row: Row, steps: int, found: dict[str, Any]) -> str:
    """One line of the table; the losses are those of the last step."""
    tpu, cpu = found["tpu"], found["cpu"]
    fields = (
        row.feature,
        f"`{row.config}`",
        row.ranks if row.then is None else f"{row.ranks}, {row.then_ranks}",
        steps,
        f"{tpu['losses'][steps - 1]:.4f}",
        f"{cpu['losses'][steps - 1]:.4f}",
        f"{found['apart']:.0e}",
        f"{tpu['seconds']:.2f}",
        f"{cpu['seconds']:.2f}",
        f"{tpu['peak_bytes'] / 2**20:.0f} MiB",
        tpu["programs_after_second"],
    )
    return f"| {' | '.join(map(str, fields))} |\n"


def main() -> None:
    """Run what is asked for; ends with 1 where a row failed or its losses are apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--directory", type=Path, help="keep runs and results here")
    parser.add_argument("--write", type=Path, help="put the table into this file, at its mark")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    asked = options.only or [row.name for row in ROWS if row.unasked]
    rows = [row for row in ROWS if row.name in asked]
    if options.list:
        print("\n".join(f"{row.name:16} {row.feature}" for row in ROWS))
        return
    directory = options.directory or Path(tempfile.mkdtemp(prefix="titan-"))
    directory.mkdir(parents=True, exist_ok=True)
    table, wrong = HEADER, []
    for row in rows:
        try:
            found = run(directory, row, options.steps)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            wrong.append(f"{row.name}: {error}")
            print(f"{row.name} failed", file=sys.stderr, flush=True)
            continue
        table += line(row, options.steps, found)
        print(line(row, options.steps, found), end="", flush=True)
        if found["apart"] > row.tolerance:
            wrong.append(f"{row.name}: losses are {found['apart']:.1e} apart")
        if found["tpu"]["fallbacks"]:
            wrong.append(f"{row.name}: {found['tpu']['fallbacks']} operators fell back")
    if options.write:
        text = options.write.read_text()
        options.write.write_text(MARK.sub(lambda m: f"{m[1]}{table}{m[2]}", text))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
