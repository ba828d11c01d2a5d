"""Compiles the tables of docs/ici.md: what collectives use of the links of TPU slices.

Needs libtpu (pip install 'tpu-dist[tpu]') and minutes; no TPU. Nothing is measured on a chip.

    python benchmarks/ici.py --write docs/ici.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from layouts import INNER_WEIGHT, layout_table

from tpu_dist.launch.plan import FORMS, VERBS
from tpu_dist.launch.planner_process import PlannerProcess
from tpu_dist.topology.system import System

MIB = 1 << 20
PAYLOADS = (64 * MIB, 512 * MIB)

WHOLE = (
    "v2:4x4",
    "v3:4x4",
    "v5e:2x2",
    "v5e:4x4",
    "v5e:8x8",
    "v5e:16x16",
    "v6e:4x4",
    "v6e:16x16",
    "v5p:2x2x2",
    "v5p:4x4x4",
    "v5p:8x8x8",
    "tpu7x:2x2x1",
    "tpu7x:2x2x2",
    "tpu7x:4x4x4",
    "tpu7x:8x8x8",
    "tpu7x:16x16x32",
    "tpu7x:16x24x24",
)
MESHES = (
    ("tpu7x:4x4x4", (8, 16)),
    ("tpu7x:4x4x4", (16, 8)),
    ("tpu7x:4x4x4", (32, 4)),
    ("tpu7x:4x4x4", (4, 4, 8)),
    ("tpu7x:8x8x8", (64, 16)),
    ("tpu7x:8x8x8", (16, 64)),
    ("tpu7x:8x8x8", (8, 16, 8)),
    ("tpu7x:16x16x32", (128, 16, 8)),
)
SLICES = (
    ("v5p:2x2x2*2", (16,)),
    ("tpu7x:4x4x4*2", (256,)),
    ("tpu7x:4x4x4*2", (2, 16, 8)),
)

INTRODUCTION = """\
# What collectives use of the links

Read from programs that libtpu 0.0.42's compiler made ahead of time;
`python benchmarks/ici.py --write docs/ici.md` writes this file. Times are modelled: bytes x
(chips - 1) / chips / (links used x bandwidth of one), twice that for an all_reduce. Latency, HBM
and the links between the devices of a chip are left out. **Nothing here was measured on a chip.**

Between slices: the bytes that cross DCN over a device's share of its chip's bandwidth.

*Naive* is the flat collective, without options, over ranks in the hosts' order; *tuned* is the form
of `collectives/tuning.py` on the layout of `tpu_dist.init_device_mesh`, the groups of an axis as
one program. Efficiency is the time that all links of the tuned layout would take, over the modelled
one. `tpu-launch plan` prints the same for any slice and mesh.

What stays below:

- v5e 16x16, all_gather: libtpu compiles none for v5e that runs along two rings at once: flat, as
  rows, along another dim, axis after axis, each uses 2 of the 4 links. So do v5e's all_gather and
  reduce_scatter on 8x16, of 3.
- v2 and v3, reduce_scatter: an all-reduce and a slice in every form.
- tpu7x 2x4x4, all_gather: an all-reduce, which it is on none of the other shapes that were tried.
- reduce_scatter above 2,048 devices becomes an all-reduce unless it is done in phases: the first
  goes along two of the three axes.
- broadcast, on all: XLA has none for TPUs. It is the sum of the root's payload and zeros, an
  all_reduce: half of what the links could carry. A tree of permutes uses one link of each chip at a
  time, and a scatter by permutes and an all_gather no more than one at the root.
- v4 cannot be planned for: its chips are one device to programs, and libtpu compiles ahead of time
  for two.

A process group's own programs are of its members alone, as nothing in c10d says that the groups of
an axis are called together. Whole slices are the same programs as here. Lines and rings are as
fast; all_gather over a plane has one ring of its two.
"""

TOTALS = """
One axis may be slower than in the hosts' order, which gives it links that another axis wants more.
All axes together are not: the all_gathers of a mesh, each axis weighted with four times the bytes
of the one outside of it, as `lay_out_mesh` does unless it is told the traffic.

| slice | mesh | naive | tuned | naive over tuned |
| --- | --- | --- | --- | --- |"""

LAYOUTS = """
## Layouts, compared with every other

Of each mesh all layouts that cut the slice's axes, near or far, were compiled
(`benchmarks/layouts.py`): 64 MiB all_gathers, in the tuned form. *Best* is the one whose axes
together take least, weighted as above. Times are of the axes, outermost first.
"""


def rows_of(
    topology: str, mesh: dict[str, int], payloads: Sequence[int], verbs: Sequence[str] = VERBS
) -> Iterator[dict[str, Any]]:
    """Yield the rows of every axis, verb, payload and form."""
    with PlannerProcess(topology, mesh) as planner:
        for axis, name in enumerate(mesh):
            for verb in verbs:
                for payload in payloads:
                    for form in FORMS:
                        case = {"axis": axis, "verb": verb, "form": form, "bytes": payload}
                        row = {**case, "axis": name, **planner.row(case)}
                        row["layout"] = planner.axes[axis]
                        print(f"{topology} {name} {verb} {form}", file=sys.stderr, flush=True)
                        yield row


def whole_slices() -> Iterator[str]:
    """Yield the table of whole slices."""
    yield "## Whole slices\n"
    sizes = "naive, 64 MiB | tuned, 64 MiB | efficiency | tuned, 512 MiB | efficiency"
    yield f"| slice | verb | {sizes} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for topology in WHOLE:
        devices = System.parse(topology).num_devices
        rows = list(rows_of(topology, {"all": devices}, PAYLOADS))
        for verb in VERBS:
            mine = [row for row in rows if row["verb"] == verb]
            naive, tuned, _, large = mine
            yield (
                f"| {topology} | {verb} | {_time(naive)} | {_time(tuned)} | {_efficiency(tuned)} "
                f"| {_time(large)} | {_efficiency(large)} |"
            )


def mesh_axes() -> Iterator[str]:
    """Yield the table of the axes of meshes."""
    yield "\n## Axes of meshes, 64 MiB\n"
    yield "| slice | mesh | axis | verb | naive | tuned | links | efficiency |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    totals = []
    for topology, shape in MESHES:
        mesh = {f"a{index}": size for index, size in enumerate(shape)}
        rows = list(rows_of(topology, mesh, PAYLOADS[:1]))
        naive_total, tuned_total = _total(rows, "naive"), _total(rows, "tuned")
        totals.append(
            f"| {topology} | {shape} | {naive_total:,.0f} us | {tuned_total:,.0f} us "
            f"| {naive_total / tuned_total:.2f} |"
        )
        for naive, tuned in zip(rows[::2], rows[1::2], strict=True):
            layout = tuned["layout"].partition(": ")[2]
            yield (
                f"| {topology} | {shape} | {layout} | {tuned['verb']} | {_time(naive)} "
                f"| {_time(tuned)} | {tuned.get('links_used', '')} | {_efficiency(tuned)} |"
            )
    yield TOTALS
    yield from totals


def between_slices() -> Iterator[str]:
    """Yield the table of several slices."""
    yield "\n## Several slices, joined over DCN, 64 MiB\n"
    yield "| slices | mesh | axis | verb | naive | tuned | efficiency |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for topology, shape in SLICES:
        mesh = {f"a{index}": size for index, size in enumerate(shape)}
        rows = list(rows_of(topology, mesh, PAYLOADS[:1]))
        for naive, tuned in zip(rows[::2], rows[1::2], strict=True):
            layout = tuned["layout"].partition(": ")[2]
            yield (
                f"| {topology} | {shape} | {layout} | {tuned['verb']} | {_time(naive)} "
                f"| {_time(tuned)} | {_efficiency(tuned)} |"
            )


def _total(rows: Sequence[dict[str, Any]], form: str) -> float:
    """All axes' all_gathers, weighted as `lay_out_mesh` weights them."""
    times = [
        row["modelled_us"] for row in rows if (row["verb"], row["form"]) == ("all_gather", form)
    ]
    return sum(INNER_WEIGHT**axis * time for axis, time in enumerate(times))


def _time(row: dict[str, Any]) -> str:
    return "failed" if "failed" in row else f"{row['modelled_us']:,.0f} us"


def _efficiency(row: dict[str, Any]) -> str:
    return row["failed"] if "failed" in row else f"{row['efficiency']:.3f}"


def main() -> None:
    """Print the tables, or write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="default: print")
    arguments = parser.parse_args()
    lines = [
        INTRODUCTION,
        *whole_slices(),
        *mesh_axes(),
        *between_slices(),
        LAYOUTS,
        *layout_table(MESHES[:-1]),
    ]
    text = "\n".join(lines) + "\n"
    if arguments.write is None:
        print(text)
    else:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
