"""How long the rendezvous takes with many hosts: the rows of docs/benchmarks.md.

    python benchmarks/rendezvous.py --hosts 2048 [--topology v6e:16x16*32] [--json FILE]

Simulated hosts in one process, each with the real client and a TCP connection of its own, against
the real service in another process (tpu_dist.launch.service.simulation). Repeats, and prints the
median and the worst of each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path

from tpu_dist.launch.service.simulation import SimulationConfig, Step, simulate
from tpu_dist.topology.system import System


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the rendezvous with many hosts.")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--topology", help="what they are hosts of; default: hosts without a TPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--server-restarts", type=int, default=0, help="in each repeat")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    config = SimulationConfig(
        num_hosts=arguments.hosts,
        system=System.parse(arguments.topology) if arguments.topology else None,
        server_restarts=arguments.server_restarts,
    )
    runs = [asyncio.run(simulate(config, lambda step: None)) for _ in range(arguments.repeats)]
    rows = [row(steps) for steps in zip(*runs, strict=True)]
    print(f"| {arguments.hosts} hosts | median s | worst s | service, MB |")
    print("| --- | --- | --- | --- |")
    for each in rows:
        print("| {what} | {median:.2f} | {worst:.2f} | {megabytes:.0f} |".format(**each))
    if arguments.json is not None:
        found = {"hosts": arguments.hosts, "topology": arguments.topology, "steps": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def row(steps: tuple[Step, ...]) -> dict[str, str | float]:
    seconds = [step.seconds for step in steps]
    return {
        "what": steps[0].what,
        "median": statistics.median(seconds),
        "worst": max(seconds),
        "megabytes": max(step.server_megabytes for step in steps),
    }


if __name__ == "__main__":
    main()
