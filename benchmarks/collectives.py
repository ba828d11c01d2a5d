"""tpu_dist against gloo, verb by verb and size by size, in one run on one machine.

    python benchmarks/collectives.py --world-size 2 --json rows.json
    python benchmarks/collectives.py --world-size 4 --verbs all_reduce,barrier --max-bytes 1048576

Both backends serve the same processes, and take turns: a round times some calls of gloo's, then as
many of tpu_dist's, so that what else the machine does meets both. The ratio is tpu_dist's median
over gloo's within a round; printed are the median of the rounds' ratios, and their 10th and 90th
percentile.

A call's time is from the call to the end of wait() on rank 0, barrier-started. Its host time is
what an asynchronous call takes to return: what a training loop pays that waits later. Sizes are of
the tensor that one rank passes in, a rank's share where a verb scatters.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Call = Callable[[Any], Any]  # group -> Work

MIB = 1 << 20
SIZES = (4, 4 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One verb at one size; times in microseconds."""

    verb: str
    world_size: int
    bytes: int
    gloo_us: float
    tpu_dist_us: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    gloo_host_us: float
    tpu_dist_host_us: float


def _all_reduce(count: int, size: int, rank: int) -> Call:
    tensor = torch.ones(count)
    return lambda group: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)


def _sum_reduce(count: int, size: int, rank: int) -> Call:
    tensor = torch.zeros(count)
    return lambda group: dist.all_reduce(tensor, group=group, async_op=True)


def _reduce(count: int, size: int, rank: int) -> Call:
    tensor = torch.zeros(count)
    return lambda group: dist.reduce(tensor, 0, group=group, async_op=True)


def _broadcast(count: int, size: int, rank: int) -> Call:
    tensor = torch.ones(count)
    return lambda group: dist.broadcast(tensor, 0, group=group, async_op=True)


def _all_gather(count: int, size: int, rank: int) -> Call:
    source, output = torch.ones(count), torch.empty(count * size)
    return lambda group: dist.all_gather_single(output, source, group=group, async_op=True)


def _reduce_scatter(count: int, size: int, rank: int) -> Call:
    source, output = torch.ones(count * size), torch.empty(count)
    return lambda group: dist.reduce_scatter_single(output, source, group=group, async_op=True)


def _all_to_all(count: int, size: int, rank: int) -> Call:
    source, output = torch.ones(count * size), torch.empty(count * size)
    return lambda group: dist.all_to_all_single(output, source, group=group, async_op=True)


def _gather(count: int, size: int, rank: int) -> Call:
    source = torch.ones(count)
    outputs = [torch.empty(count) for _ in range(size)] if rank == 0 else None
    return lambda group: dist.gather(source, outputs, 0, group=group, async_op=True)


def _scatter(count: int, size: int, rank: int) -> Call:
    output = torch.empty(count)
    sources = [torch.ones(count) for _ in range(size)] if rank == 0 else None
    return lambda group: dist.scatter(output, sources, 0, group=group, async_op=True)


def _ring(count: int, size: int, rank: int) -> Call:
    source, output = torch.ones(count), torch.empty(count)

    class Both:
        def __init__(self, works: list[Any]) -> None:
            self.works = works

        def wait(self) -> None:
            for work in self.works:
                work.wait()

    def call(group: Any) -> Both:
        receive = dist.irecv(output, (rank - 1) % size, group=group)
        send = dist.isend(source, (rank + 1) % size, group=group)
        return Both([receive, send])

    return call


def _barrier(count: int, size: int, rank: int) -> Call:
    return lambda group: dist.barrier(group=group, async_op=True)


VERBS: Mapping[str, Callable[[int, int, int], Call]] = {
    "all_reduce": _sum_reduce,
    "all_reduce MAX": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv ring": _ring,
    "barrier": _barrier,
}


def _times(call: Call, group: Any, calls: int) -> tuple[float, float]:
    """Median seconds of a whole call, and until it returns."""
    whole, until_return = [], []
    for _ in range(calls):
        start = time.perf_counter()
        work = call(group)
        returned = time.perf_counter()
        work.wait()
        whole.append(time.perf_counter() - start)
        until_return.append(returned - start)
    return statistics.median(whole), statistics.median(until_return)


def _measure(verb: str, num_bytes: int, rounds: int, size: int, rank: int, gloo: Any) -> Row:
    call = VERBS[verb](max(1, num_bytes // 4), size, rank)
    calls = 20 if num_bytes < MIB else 5 if num_bytes < 16 * MIB else 2
    groups = {"gloo": gloo, "tpu_dist": dist.group.WORLD}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
    for _ in range(rounds + 1):
        for name, group in groups.items():
            dist.barrier(group=gloo)
            samples[name].append(_times(call, group, calls))
    wholes = {name: [whole for whole, _ in found[1:]] for name, found in samples.items()}
    hosts = {name: [host for _, host in found[1:]] for name, found in samples.items()}
    ratios = sorted(t / g for t, g in zip(wholes["tpu_dist"], wholes["gloo"], strict=True))
    return Row(
        verb=verb,
        world_size=size,
        bytes=num_bytes,
        gloo_us=round(statistics.median(wholes["gloo"]) * 1e6, 1),
        tpu_dist_us=round(statistics.median(wholes["tpu_dist"]) * 1e6, 1),
        ratio=round(statistics.median(ratios), 2),
        ratio_p10=round(ratios[len(ratios) // 10], 2),
        ratio_p90=round(ratios[-1 - len(ratios) // 10], 2),
        gloo_host_us=round(statistics.median(hosts["gloo"]) * 1e6, 1),
        tpu_dist_host_us=round(statistics.median(hosts["tpu_dist"]) * 1e6, 1),
    )


def _rank_main(rank: int, args: argparse.Namespace, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "tpu_dist", init_method=f"file://{store}", rank=rank, world_size=args.world_size
    )
    gloo = dist.new_group(backend="gloo")
    rows = []
    for verb in args.verbs:
        for num_bytes in SIZES:
            if num_bytes > args.max_bytes or (verb == "barrier" and num_bytes > SIZES[0]):
                continue
            row = _measure(verb, num_bytes, args.rounds, args.world_size, rank, gloo)
            rows.append(row)
            if rank == 0:
                print(_line(row), flush=True)
    if rank == 0:
        Path(results).write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def _line(row: Row) -> str:
    return (
        f"{row.verb:15} {_size(row.bytes):>8} x{row.world_size}  gloo {row.gloo_us:9.0f} us  "
        f"tpu_dist {row.tpu_dist_us:9.0f} us  ratio {row.ratio:5.2f} "
        f"({row.ratio_p10:.2f} to {row.ratio_p90:.2f})  "
        f"host {row.gloo_host_us:5.0f} / {row.tpu_dist_host_us:5.0f} us"
    )


def _size(num_bytes: int) -> str:
    for unit, size in (("MiB", MIB), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def _summary(rows: list[dict[str, Any]]) -> str:
    def median(selected: list[float]) -> str:
        return f"{statistics.median(selected):.2f}" if selected else "-"

    large = [row["ratio"] for row in rows if row["bytes"] >= MIB]
    small = [row["ratio"] for row in rows if row["bytes"] < MIB]
    return (
        f"median of ratios: {median(large)} from 1 MiB up, {median(small)} below; largest: "
        f"{max(large, default=0):.2f} and {max(small, default=0):.2f}"
    )


def main() -> int:
    """Run, print the rows, write them where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--verbs",
        type=lambda text: text.split(","),
        default=list(VERBS),
        help=f"comma-separated, of: {', '.join(VERBS)}",
    )
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    unknown = [verb for verb in args.verbs if verb not in VERBS]
    if unknown:
        parser.error(f"unknown verbs {unknown}; known are {', '.join(VERBS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TPU_DIST_PLATFORM"] = "cpu"
    import jaxlib

    heading = (
        f"torch {torch.__version__}, jaxlib {jaxlib.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, {date.today()}"
    )
    print(heading)
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/rows.json"
        mp.spawn(_rank_main, (args, f"{folder}/store", results), nprocs=args.world_size)
        rows = json.loads(Path(results).read_text())
    print(_summary(rows))
    if args.json:
        args.json.write_text(json.dumps({"heading": heading, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
