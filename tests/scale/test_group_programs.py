"""The process group's own programs, compiled by libtpu for slices that are not here.

Skipped where libtpu is not installed (pip install 'tpu-dist[tpu]').
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tpu_dist.collectives.ahead_of_time import COMPILER_ENVIRONMENT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed"
)

# In a process of its own: the compiler may end it.
COMPILE = """
import json, sys
import torch
from tpu_dist.collectives.ahead_of_time import Compiler
from tpu_dist.collectives.compiled_program import read_program
from tpu_dist.collectives.dtypes import moving_wire, wire_type
from tpu_dist.collectives.forms import FormContext
from tpu_dist.collectives.plans import choose_plan
from tpu_dist.collectives.programs import compile_form, tune
from tpu_dist.collectives.reducers import REDUCERS
from tpu_dist.topology.placement import place_group
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System

topology, ranks, dtypes = json.loads(sys.argv[1])
system = System.parse(topology)
compiler = Compiler(system)
placement = place_group(RankMap.row_major(system), ranks)
assert placement.can_run_programs
size = 1 << 16
for dtype in dtypes:
    for verb, name in (
        ("all_reduce", "SUM"), ("reduce_scatter", "SUM"), ("all_gather", None),
        ("broadcast", None), ("scatter", None), ("all_to_all", None),
    ):
        wire = wire_type(getattr(torch, dtype))
        reducer = REDUCERS[name] if name else None
        if reducer is None:
            wire = moving_wire(wire, by_sums=verb in ("broadcast", "scatter"))
        plan = choose_plan(
            "tpu", verb, num_elements=size, element_bytes=wire.carrier.itemsize,
            num_ranks=len(ranks), wire=wire, reducer=reducer,
        )
        root = 0 if verb in ("broadcast", "scatter") else None
        context = FormContext(num_ranks=len(ranks), wire=wire, reducer=reducer, root=root)
        context = tune(plan.form, size, context, placement)
        devices = [compiler.devices[rank] for rank in ranks]
        program = compile_form(plan.form, size, context, devices)
        found = [f"{c.kind} {c.algorithm} {c.colours}" for c in read_program(program.as_text())]
        print("@" + json.dumps([dtype, verb, found]), flush=True)
"""


def compiled(
    topology: str, ranks: list[int], dtypes: list[str]
) -> dict[tuple[str, str], list[str]]:
    """Return the collectives of each program, by dtype and verb."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([topology, ranks, dtypes])],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **COMPILER_ENVIRONMENT, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    return {(dtype, verb): found for dtype, verb, found in lines}


@pytest.mark.parametrize(
    ("topology", "size", "colours"),
    [("v5e:4x4", 16, 2), ("v5p:2x2x2", 8, 6), ("tpu7x:2x2x2", 16, 6)],
)
def test_a_whole_slice_uses_all_links(topology: str, size: int, colours: int) -> None:
    found = compiled(topology, list(range(size)), ["float32", "bfloat16"])
    for dtype in ("float32", "bfloat16"):
        for verb, kind in (("all_gather", "all-gather"), ("reduce_scatter", "reduce-scatter")):
            first = found[dtype, verb][0]
            assert first.startswith(kind), first
            assert int(first.rsplit(" ", 1)[1]) >= colours, first
        assert found[dtype, "all_reduce"][0].startswith("all-reduce")
        assert found[dtype, "broadcast"][0].startswith("all-reduce")
        assert found[dtype, "all_to_all"][0].startswith("all-to-all")


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        ("v5p:4x4x4", [0, 16, 32, 48]),  # a ring
        ("tpu7x:4x4x4", list(range(0, 8))),  # a ring of chips with both of their devices
        ("tpu7x:2x2x2", [0, 3, 5]),  # no block, and an odd number
        ("v5e:2x2", [0, 1]),
        ("tpu7x:2x2x1*2", list(range(16))),
    ],
)
def test_every_kind_of_group_has_programs(topology: str, ranks: list[int]) -> None:
    found = compiled(topology, ranks, ["float32"])
    assert len(found) == 6
    assert all(found.values())
