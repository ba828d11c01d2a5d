"""Run the c10d conformance suites against "tpu_dist", and keep their tables.

    python tests/conformance/run.py --shard 0/12     # a share of torch's suite, some cases: minutes
    python tests/conformance/run.py --full           # all, 2 and 4 ranks: an hour; writes docs/

The suites are not part of this repository: conformance.py runs the test bodies that the torch
wheel ships, c10d_cases.py checks every verb, dtype, op and shape against numpy. --tools says where
they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
WORLD_SIZES = (2, 4)
BAD = ("WRONG", "MIXED", "HANG", "CRASH", "SILENT")


def _run(command: list[str]) -> int:
    print("$", " ".join(command), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TPU_DIST_PLATFORM": "cpu"}
    return subprocess.run(command, env=environment, check=False).returncode


def _common(tools: Path, name: str, world_size: int, reference: str) -> list[str]:
    return [
        sys.executable,
        str(tools / name),
        "--backend=tpu_dist",
        "--import=tpu_dist",
        f"--world-size={world_size}",
        f"--reference={tools / 'reference' / f'{reference}_gloo{world_size}.json'}",
    ]


def _bodies(tools: Path, world_size: int, results: Path, extra: list[str]) -> int:
    command = _common(tools, "conformance.py", world_size, "R")
    command += [f"--expected={HERE / 'expected.txt'}", f"--json={results}", *extra]
    return _run(command)


def _cases(tools: Path, world_size: int, results: Path, extra: list[str]) -> int:
    command = _common(tools, "c10d_cases.py", world_size, "C")
    results.unlink(missing_ok=True)
    code = _run([*command, f"--json={results}", *extra])
    if not results.exists():
        return code or 1
    reference = _read(tools / "reference" / f"C_gloo{world_size}.json")
    passed = {(row[0], row[1], row[2]) for row in reference if row[3] == "ok"}
    expected = _expected_cases(world_size)
    unexpected = [
        f"{'/'.join(row[:3])}: {row[3]} {row[4]}"
        for row in _read(results)
        if (row[3] in BAD or (row[3] == "error" and tuple(row[:3]) in passed))
        and "/".join(row[:3]) not in expected
    ]
    print("\n".join(["not expected:", *unexpected] if unexpected else ["all as expected"]))
    return 1 if unexpected else 0


def _read(results: Path) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(results.read_text())["results"]
    return rows


def _expected_cases(world_size: int) -> dict[str, str]:
    """Reasons of the cases that are known not to be ok, by verb/dtype/case."""
    reasons = {}
    for line in (HERE / "expected_cases.txt").read_text().splitlines():
        name, _, reason = line.partition("  # ")
        case, _, only = name.partition("@")
        if reason and not line.startswith("#") and only in ("", str(world_size)):
            reasons[case] = reason
    return reasons


def _heading() -> str:
    import jaxlib
    import torch

    return (
        f"torch {torch.__version__}, jaxlib {jaxlib.__version__}, Python "
        f"{platform.python_version()}, CPU stand-in, {os.cpu_count()} cores, {date.today()}"
    )


def _bodies_table(results: dict[int, list[dict[str, Any]]], references: dict[int, Any]) -> str:
    lines = ["| ranks | gloo passes | tpu_dist passes of these | others that tpu_dist passes |"]
    lines.append("| --- | --- | --- | --- |")
    exceptions = []
    for world_size, rows in results.items():
        status = {row["test"]: row for row in rows}
        counted = [t for t, s in references[world_size].items() if s in ("pass", "xpass")]
        passed = [t for t in counted if status.get(t, {}).get("status") in ("pass", "xpass")]
        more = [t for t, r in status.items() if r["status"] == "pass" and t not in counted]
        lines.append(f"| {world_size} | {len(counted)} | {len(passed)} | {len(more)} |")
        exceptions += [
            f"- {test}, {world_size} ranks: {_why(status.get(test, {}))}"
            for test in counted
            if test not in passed
        ]
    return "\n".join([*lines, "", "Of gloo's, not passed:", "", *(exceptions or ["- none"])])


def _why(row: dict[str, Any]) -> str:
    return str(row.get("expected") or row.get("reason", "not run"))


def _cases_table(results: dict[int, list[list[Any]]]) -> str:
    parts = []
    for world_size, rows in results.items():
        total = Counter(row[3] for row in rows)
        parts += [
            f"### {world_size} ranks: {len(rows)} cases, "
            + ", ".join(f"{kind} {count}" for kind, count in total.most_common()),
            "",
            "| verb | ok | clean errors | wrong, mixed, hang, crash, silent |",
            "| --- | --- | --- | --- |",
        ]
        for verb in dict.fromkeys(row[0] for row in rows):
            count = Counter(row[3] for row in rows if row[0] == verb)
            bad = sum(count[kind] for kind in BAD)
            parts.append(f"| {verb} | {count['ok']} | {count['error']} | {bad} |")
        expected = _expected_cases(world_size)
        errors = Counter(
            (
                row[0],
                row[2].split()[0],
                expected.get("/".join(row[:3])) or row[4].partition(":")[2].strip()[:110],
            )
            for row in rows
            if row[3] != "ok"
        )
        parts += ["", "Not ok:", ""]
        parts += [
            f"- {count} x {verb} {case}: {why}" for (verb, case, why), count in errors.most_common()
        ] or ["- none"]
        parts.append("")
    return "\n".join(parts)


def write_tables(folder: Path, tools: Path, target: Path) -> None:
    """Turn the suites' results in `folder` into the page `target`."""
    bodies, references, cases = {}, {}, {}
    for world_size in WORLD_SIZES:
        bodies[world_size] = json.loads((folder / f"bodies{world_size}.json").read_text())[
            "results"
        ]
        reference = json.loads((tools / "reference" / f"R_gloo{world_size}.json").read_text())
        references[world_size] = {row["test"]: row["status"] for row in reference["results"]}
        cases[world_size] = _read(folder / f"cases{world_size}.json")
    target.write_text(
        f"# Conformance\n\nMade by `make conformance` (tests/conformance/run.py --full): "
        f"{_heading()}.\n\n"
        "## The test bodies that torch ships\n\n"
        f"{_bodies_table(bodies, references)}\n\n"
        "## Every verb, dtype, op and shape, against numpy\n\n"
        f"{_cases_table(cases)}"
    )


def main() -> int:
    """Run what was asked for; 1 if anything failed that should not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=Path, default=REPOSITORY.parent / "shared" / "tools")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "runs" / "conformance")
    parser.add_argument("--shard", default="0/12", help="i/n of torch's bodies, on 2 ranks")
    parser.add_argument("--full", action="store_true", help="everything, and write docs/")
    parser.add_argument("--tables-only", action="store_true", help="write docs/ from --results")
    args = parser.parse_args()
    if not (args.tools / "conformance.py").is_file():
        parser.error(f"no conformance.py in {args.tools}; say where the suites are with --tools")
    args.results.mkdir(parents=True, exist_ok=True)
    failed = 0
    if args.full:
        for world_size in WORLD_SIZES:
            failed |= _bodies(args.tools, world_size, args.results / f"bodies{world_size}.json", [])
            failed |= _cases(args.tools, world_size, args.results / f"cases{world_size}.json", [])
    elif not args.tables_only:
        shard = ["--shard", args.shard]
        failed |= _bodies(args.tools, 2, args.results / "bodies-shard.json", shard)
        some = ["--verbs=^(all_reduce|all_gather|send_recv|functional)$", "--dtypes=^bfloat16$"]
        failed |= _cases(args.tools, 2, args.results / "cases-shard.json", some)
    if args.full or args.tables_only:
        write_tables(args.results, args.tools, REPOSITORY / "docs" / "conformance.md")
    return failed


if __name__ == "__main__":
    sys.exit(main())
