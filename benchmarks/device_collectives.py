"""What a collective on device tensors costs the host, and how long its result takes.

    python benchmarks/device_collectives.py --ranks 2     # a table in Markdown; --json for lines

`host` is the time from the call to the return of wait() on rank 0, in which a training loop can do
nothing else; `result` is the time until the result can be read. Medians of calls that both ranks
begin together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = (4 << 10, 256 << 10, 1 << 20, 16 << 20)  # bytes
ROUNDS = 40


def calls(num_bytes: int, device: str) -> dict[str, Callable[[], Any]]:
    """What is measured; `num_bytes` is what a rank has of the larger tensor."""
    whole = torch.zeros(num_bytes // 4, device=device)
    part = torch.zeros(num_bytes // 4 // dist.get_world_size(), device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, async_op=True),
        "all_gather": lambda: dist.all_gather_single(whole, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, async_op=True),
        "broadcast": lambda: dist.broadcast(whole, 0, async_op=True),
    }


def measure(verb: str, num_bytes: int, device: str) -> dict[str, Any]:
    """One row."""
    call = calls(num_bytes, device)[verb]
    host, result = [], []
    for turn in range(ROUNDS + 5):
        dist.barrier()
        began = time.perf_counter()
        call().wait()
        returned = time.perf_counter()
        if device == "tpu":
            torch.tpu.synchronize()
        if turn >= 5:
            host.append((returned - began) * 1e6)
            result.append((time.perf_counter() - began) * 1e6)
    return {
        "verb": verb,
        "device": device,
        "bytes": num_bytes,
        "host_us": statistics.median(host),
        "result_us": statistics.median(result),
    }


def run(rank: int, ranks: int, folder: str, as_json: bool, verbs: list[str]) -> None:
    """What each process does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "tpu_dist", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    if rank == 0 and not as_json:
        print("| | on | host, us | result, us |\n| --- | --- | --- | --- |")
    for verb, device, num_bytes in itertools.product(verbs, ("cpu", "tpu"), SIZES):
        row = measure(verb, num_bytes, device)
        if rank == 0 and as_json:
            print(json.dumps(row), flush=True)
        elif rank == 0:
            times = f"{row['host_us']:.0f} | {row['result_us']:.0f}"
            print(f"| {verb} of {num_bytes} bytes | {device} | {times} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    parser.add_argument("--verbs", default="all_reduce,all_gather,reduce_scatter,broadcast")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = (arguments.ranks, folder, arguments.json, arguments.verbs.split(","))
        mp.spawn(run, options, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
