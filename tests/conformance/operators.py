"""torch's own operator database, on the device against the CPU.

    python tests/conformance/operators.py --write       # all of it, writes docs/operators.md
    python tests/conformance/operators.py --only add mm # some of it, prints what differs
    python tests/conformance/operators.py --keep rows.jsonl --dtypes float32   # a part of it, and
    python tests/conformance/operators.py --table rows.jsonl                   # the table of parts

For each operator and dtype: every sample forwards, and backwards where the CPU can. A row of the
table says what became of the worst sample: native (no fallback), fallback (some operator ran on the
CPU), unsupported (it raises, where the CPU does not), wrong (it differs from the CPU).
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
BACKWARD = ("float32", "bfloat16", "complex64")

# Results differ by right: they are random, or not written to.
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu",
    "nn.functional.multi_head_attention_forward",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "normal.in_place",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "uniform", "empty", "empty_like",
    "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "normal.number_mean",
    "pca_lowrank", "svd_lowrank", "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}  # fmt: skip
# Vectors of a basis are unique up to a factor: their values are compared by what they make.
UP_TO_A_FACTOR = {"linalg.eig", "linalg.eigh", "linalg.svd", "svd", "linalg.qr", "qr", "geqrf",
                  "linalg.householder_product", "ormqr", "linalg.lu", "linalg.lu_factor",
                  "linalg.lu_factor_ex", "lu", "lu_unpack", "linalg.ldl_factor",
                  "linalg.ldl_factor_ex"}  # fmt: skip
# Which of several equal elements is meant is nobody's business: the index is not compared.
TIES = {"kthvalue", "median", "mode", "nanmedian", "topk", "sort", "argsort", "msort"}
TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (3e-2, 3e-2), "complex64": (1e-3, 1e-4)}
EXACT = (0.0, 0.0)


def to(value: Any, device: str) -> Any:
    """`value` with its tensors on `device`, as leaves."""
    if isinstance(value, torch.Tensor):
        moved = value.detach().to(device)
        return moved.requires_grad_(value.requires_grad) if moved.is_leaf else moved
    if isinstance(value, (list, tuple)):
        items = [to(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: to(item, device) for key, item in value.items()}
    if isinstance(value, (torch.device, str)) and str(value) == "cpu":
        return torch.device(device) if isinstance(value, torch.device) else device
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def call(op: Any, sample: Any, device: str) -> tuple[Any, list[torch.Tensor]]:
    """The operator's results for a copy of a sample, and the copy's leaves."""
    args, kwargs = to((sample.input, *sample.args), device), to(sample.kwargs, device)
    leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
    result = op(*args, **kwargs)
    return sample.output_process_fn_grad(result) if leaves else result, leaves


def gradients(result: Any, leaves: list[torch.Tensor], device: str) -> list[torch.Tensor | None]:
    outputs = [t for t in tensors(result) if t.requires_grad]
    if not outputs:
        return []
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(o.shape, generator=generator, dtype=torch.float32).to(o.dtype).to(device)
        for o in outputs
    ]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def differs(ours: Any, theirs: Any, tolerance: tuple[float, float]) -> str | None:
    """What is not the same, in words."""
    left, right = list(tensors(ours)), list(tensors(theirs))
    if len(left) != len(right):
        return f"{len(left)} tensors instead of {len(right)}"
    for a, b in zip(left, right, strict=True):
        if a.layout is not torch.strided or b.layout is not torch.strided:
            continue
        if a.dtype is torch.float32 and b.dtype is torch.bfloat16:
            a = a.to(b.dtype)  # saved statistics are float32 on every device but the CPU
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        rtol, atol = tolerance if a.dtype.is_floating_point or a.dtype.is_complex else EXACT
        if a.dtype is torch.bfloat16 and b.numel():  # the CPU rounds its partial sums, too
            finite = b.detach().float().nan_to_num(0, 0, 0).abs()
            atol = max(atol, 3e-2 * finite.max().item())
        try:
            torch.testing.assert_close(
                a.detach().cpu().resolve_conj().resolve_neg(),
                b.detach().resolve_conj().resolve_neg(),
                rtol=rtol, atol=atol, equal_nan=True, check_device=False, check_stride=False,
            )  # fmt: skip
        except AssertionError as error:
            return str(error).replace("\n", " ")[:300]
    return None


def examine(info: Any, dtype_name: str, limit: int) -> dict[str, Any]:
    """One operator in one dtype."""
    dtype = DTYPES[dtype_name]
    name = info.formatted_name
    wants_grad = dtype_name in BACKWARD and dtype in info.supported_backward_dtypes("cpu")
    wants_grad = wants_grad and info.supports_autograd
    tolerance = TOLERANCES.get(dtype_name, TOLERANCES["float32"])
    try:
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=wants_grad))
    except Exception as error:
        return {"status": "skipped", "detail": f"no samples: {error}"[:200]}
    step = max(1, len(samples) // limit) if limit else 1
    torch.tpu.reset_fallback_counts()
    done, worst, detail = 0, "native", ""
    for sample in samples[::step]:
        if info.variant_test_name == "partial_views":
            continue  # a copy has another storage than its views were made of
        try:
            torch.manual_seed(0)
            theirs, their_leaves = call(info.op, sample, "cpu")
            their_grads = gradients(theirs, their_leaves, "cpu") if wants_grad else []
        except Exception:
            continue  # the CPU cannot, either
        try:
            torch.manual_seed(0)
            ours, our_leaves = call(info.op, sample, "tpu")
            our_grads = gradients(ours, our_leaves, "tpu") if wants_grad else []
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            frames = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[-4:])
            return {"status": "unsupported", "detail": f"{text} [{where}]"}
        done += 1
        base = info.name
        if base == "native_layer_norm":  # of one element the gradient is 0; the CPU rounds
            tolerance = (tolerance[0], 2e-3)
        if sample.kwargs.get("dropout_p"):
            continue  # what is dropped is random
        if base in RANDOM or base in UP_TO_A_FACTOR:
            continue
        if base in TIES and dtype_name in ("int64", "bool", "bfloat16"):
            their_grads = []
            if isinstance(theirs, torch.Tensor):
                continue
            ours, theirs = ours[0], theirs[0]
        found = differs(ours, theirs, tolerance)
        if found is None and their_grads:
            found = differs(our_grads, their_grads, tolerance)
            found = None if found is None else f"gradient: {found}"
        if found is not None:
            shapes = [tuple(t.shape) for t in tensors((sample.input, sample.args))]
            worst, detail = "wrong", f"{found} for {shapes} {sample.kwargs}"[:400]
            break
    if not done:
        return {"status": "skipped", "detail": "no sample runs on the CPU"}
    fallbacks = torch.tpu.fallback_counts()
    if worst == "native" and fallbacks:
        worst, detail = "fallback", ", ".join(sorted(fallbacks))
    return {"status": worst, "detail": detail, "name": name}


def child(start: int, stop: int, only: list[str], dtypes: list[str], limit: int) -> None:
    """Examine a range of the database; a line of JSON for each operator and dtype."""
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    from tpu_dist.runtime.operators.programs import empty_caches

    torch.zeros(1, device="tpu")
    for place in range(start, min(stop, len(op_db))):
        info = op_db[place]
        if only and info.name not in only and info.formatted_name not in only:
            continue
        for dtype_name in dtypes:
            if DTYPES[dtype_name] not in info.supported_dtypes("cpu"):
                continue
            print(
                json.dumps({"at": place, "op": info.formatted_name, "dtype": dtype_name}),
                flush=True,
            )
            began = time.perf_counter()
            found = examine(info, dtype_name, limit)
            seconds = round(time.perf_counter() - began, 2)
            row = {"at": place, "op": info.formatted_name, "dtype": dtype_name, "seconds": seconds}
            print(json.dumps(row | found), flush=True)
            empty_caches()
            import jax

            jax.clear_caches()


def examine_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run children over the whole database; a dead one is started again behind what it died of."""
    from torch.testing._internal.common_methods_invocations import op_db

    rows: list[dict[str, Any]] = []
    place, stop = arguments.start, min(arguments.stop or len(op_db), len(op_db))
    while place < stop:
        end = min(place + arguments.chunk, stop) if not arguments.only else stop
        command = [sys.executable, __file__, "--child", "--start", str(place), "--stop", str(end),
                   "--limit", str(arguments.limit), "--dtypes", *arguments.dtypes,
                   "--only", *arguments.only]  # fmt: skip
        last: dict[str, Any] | None = None
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                last = json.loads(line)
                if "status" in last:
                    rows.append(last)
                    if arguments.keep:
                        with open(arguments.keep, "a") as kept:
                            kept.write(line)
                    if last["status"] in arguments.show:
                        words = f"{last['status']:12} {last['op']:45} {last['dtype']:10}"
                        print(words, last["seconds"], last["detail"], flush=True)
        if process.returncode and last is not None:
            if "status" not in last:
                rows.append(
                    last | {"status": "crash", "detail": f"exit {process.returncode}", "seconds": 0}
                )
                print("crash", last["op"], last["dtype"], flush=True)
            place = last["at"] + 1
        elif process.returncode:
            raise RuntimeError(f"the child failed before it began: exit {process.returncode}")
        else:
            place = end
    return rows


def table(rows: list[dict[str, Any]], note: str) -> str:
    """docs/operators.md."""
    by_op: dict[str, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for row in rows:
        by_op[row["op"]][row["dtype"]] = row
    latest = [row for dtypes in by_op.values() for row in dtypes.values()]
    counts = collections.Counter((row["dtype"], row["status"]) for row in latest)
    statuses = ("native", "fallback", "unsupported", "wrong", "crash", "skipped")
    lines = [
        "# Operators",
        "",
        "Written by `python tests/conformance/operators.py --write`: torch's operator database",
        "(`op_db`), on the device against the CPU; forwards in all dtypes, backwards too in",
        "float32, bfloat16 and complex64. *native*: no operator that it comes to ran on the CPU.",
        "*fallback*: some did, which are named. *unsupported*: raises, where the CPU does not.",
        "*wrong*: differs. *skipped*: the CPU cannot run its samples in this dtype.",
        *([note] if note else []),
        "",
        "| dtype | " + " | ".join(statuses) + " |",
        "| --- |" + " --- |" * len(statuses),
    ]
    for dtype in DTYPES:
        lines.append(f"| {dtype} | " + " | ".join(str(counts[dtype, s]) for s in statuses) + " |")
    lines += [
        "",
        "| operator | " + " | ".join(DTYPES) + " | falls back |",
        "| --- |" + " --- |" * 6,
    ]
    for op in sorted(by_op):
        cells = [by_op[op].get(dtype, {}).get("status", "") for dtype in DTYPES]
        names = {
            n
            for r in by_op[op].values()
            if r["status"] == "fallback"
            for n in r["detail"].split(", ")
        }
        lines.append(f"| {op} | " + " | ".join(cells) + f" | {', '.join(sorted(names))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/operators.md")
    parser.add_argument("--only", nargs="*", default=[], help="names of operators")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--limit", type=int, default=12, help="samples a dtype; 0: all")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--stop", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=40, help="operators a process")
    parser.add_argument("--show", nargs="*", default=["wrong", "unsupported", "crash"])
    parser.add_argument("--keep", help="file to append finished rows to, a line of JSON each")
    parser.add_argument("--table", nargs="*", help="write docs/operators.md from files of --keep")
    parser.add_argument("--note", default="", help="a sentence for the table's head")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.start, arguments.stop, arguments.only, arguments.dtypes, arguments.limit)
        return
    if arguments.table:
        rows = [
            json.loads(row) for f in arguments.table for row in Path(f).read_text().splitlines()
        ]
        arguments.write = True
    else:
        rows = examine_all(arguments)
    print(collections.Counter((row["dtype"], row["status"]) for row in rows))
    if arguments.write:
        target = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
        target.write_text(table(rows, arguments.note))


if __name__ == "__main__":
    main()
