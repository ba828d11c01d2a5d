"""What an operator on "tpu" costs the host, against the same on CPU tensors.

    python benchmarks/eager.py            # a table in Markdown; --json for a line each

CPU time of the calling thread, in microseconds: the least of several rounds, since others may use
the machine. On the CPU stand-in small programs run on the calling thread too, so it is in there.
The last lines count programs compiled after the second step, which must be none.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

ROUNDS = 7


def cost(function: Callable[[], Any], calls: int) -> float:
    """Microseconds of this thread's CPU time that a call takes."""
    for _ in range(max(3, calls // 10)):
        function()
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(calls):
            function()
        best = min(best, (time.thread_time() - began) / calls)
    return best * 1e6


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)


def training_step(device: str) -> Callable[[], Any]:
    """Forward and backward of two layers."""
    net, x = model(device), torch.ones(16, 64, device=device)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(x).square().mean().backward()

    return step


def optimizer_step(device: str, **options: Any) -> Callable[[], Any]:
    net = model(device)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(net.parameters(), lr=1e-3, **options).step


def cases(device: str) -> Iterator[tuple[str, Callable[[], Any], int]]:
    a, b = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)
    target = torch.ones(8, 8, device=device)

    def write() -> None:
        target[2:5].fill_(3)

    yield "add", lambda: torch.add(a, b), 2000
    yield "add_", lambda: target.add_(b), 2000
    yield "mul by a number", lambda: a * 2.5, 2000
    yield "mm", lambda: torch.mm(a, b), 2000
    yield "a view (t)", a.t, 2000
    yield "a view (select)", lambda: a[1], 2000
    yield "a write to a view", write, 1000
    yield "MLP forward and backward", training_step(device), 60
    yield "AdamW foreach", optimizer_step(device, foreach=True), 60
    yield "AdamW fused", optimizer_step(device, fused=True), 60


BOUNDS = {"add": 15, "add_": 15, "mm": 15, "a view (t)": 5, "a view (select)": 5,
          "a write to a view": 40}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.json:
        print("| µs of CPU time | CPU tensors | tpu tensors | bound | compiled after step 2 |")
        print("| --- | --- | --- | --- | --- |")
    pairs = zip(cases("cpu"), cases("tpu"), strict=True)
    for (name, theirs, calls), (_, ours, _) in pairs:
        ours(), ours()
        before = torch.tpu.num_compiled_programs()
        row = {"name": name, "cpu": cost(theirs, calls), "tpu": cost(ours, calls)}
        row["compiled"] = torch.tpu.num_compiled_programs() - before
        if arguments.json:
            print(json.dumps(row))
        else:
            bound = BOUNDS.get(name, "")
            numbers = f"{row['cpu']:.1f} | {row['tpu']:.1f} | {bound} | {row['compiled']}"
            print(f"| {name} | {numbers} |", flush=True)
    counts = torch.tpu.fallback_counts()
    print(f"fallbacks: {counts or 'none'}")


if __name__ == "__main__":
    main()
