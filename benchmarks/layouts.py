"""Compares the layouts of meshes with every other that there is, by what libtpu's compiler makes.

A layout cuts each axis of the slice into a factor for each axis of the mesh, and says which are the
near positions. For each, the all_gather of every axis is compiled in its tuned form, and its time
modelled; layouts that differ by the names of the slice's axes alone count once. Of all layouts the
best is the one whose axes together take least, weighted as `lay_out_mesh` weights them.

    python benchmarks/layouts.py tpu7x:4x4x4 16,8

Needs libtpu, minutes, and no TPU. `benchmarks/ici.py` puts the results into docs/ici.md.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from tpu_dist.collectives.ahead_of_time import COMPILER_ENVIRONMENT, DTYPE, Compiler
from tpu_dist.collectives.compiled_program import read_program
from tpu_dist.collectives.ici_model import estimate
from tpu_dist.collectives.tuning import Case, tuned_forms
from tpu_dist.topology.groups import CORE_AXIS, Group
from tpu_dist.topology.mesh_layout import AxisLayout, MeshLayout, digits_of, extents
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.placement import place_group
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System

PAYLOAD = 64 << 20
INNER_WEIGHT = 4.0  # of an axis against the one outside of it: `lay_out_mesh`'s own

Row = tuple[tuple[int, ...], tuple[int, ...]]  # of one axis of the slice: factors, strides


@dataclass(frozen=True)
class Comparison:
    """What came of one mesh; times in microseconds, one for each axis.

    Attributes:
        chosen: of the layout that `lay_out_mesh` chooses.
        best: of the layout that takes least in all.
        least: of each axis by itself, in whichever layout it is fastest.
        layouts: how many were compared.
        programs: how many different groups were compiled.
    """

    chosen: list[float]
    best: list[float]
    least: list[float]
    layouts: int
    programs: int

    @property
    def worst(self) -> float:
        """The chosen over the best layout's time, of the axis where that is most."""
        pairs = zip(self.chosen, self.best, strict=True)
        return max(mine / other if other else 1.0 for mine, other in pairs)


def every_layout(system: System, shape: tuple[int, ...]) -> Iterator[MeshLayout]:
    """Yield each layout of a mesh on one slice."""

    def rows(extent: int, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not left:
            if extent == 1:
                yield ()
            return
        for factor in range(1, math.gcd(extent, left[0]) + 1):
            if extent % factor == 0 and left[0] % factor == 0:
                for rest in rows(extent // factor, left[1:]):
                    yield (factor, *rest)

    def strided(factors: tuple[int, ...]) -> Iterator[Row]:
        cut = [axis for axis, factor in enumerate(factors) if factor > 1]
        for order in permutations(cut):
            strides, stride = [1] * len(factors), 1
            for axis in order:
                strides[axis], stride = stride, stride * factors[axis]
            yield factors, tuple(strides)

    def choose(
        axes: tuple[int, ...], left: tuple[int, ...], chosen: list[Row]
    ) -> Iterator[list[Row]]:
        if not axes:
            if all(size == 1 for size in left):
                yield chosen
            return
        for factors in rows(axes[0], left):
            rest = tuple(size // factor for size, factor in zip(left, factors, strict=True))
            for row in strided(factors):
                yield from choose(axes[1:], rest, [*chosen, row])

    for chosen in choose(extents(system), shape, []):
        axes = []
        for axis in range(len(shape)):
            digits = digits_of([row[0][axis] for row in chosen], [row[1][axis] for row in chosen])
            group = Group(slice=system.slice, digits=digits)
            axes.append(AxisLayout(name=f"axis{axis}", group=group))
        yield MeshLayout(system=system, axes=tuple(axes))


def kind_of(group: Group) -> tuple[object, ...]:
    """Return what groups have in common that only the names of axes tell apart."""
    slice_ = group.slice
    cores = tuple(digit.size for digit in group.digits if digit.axis == CORE_AXIS)
    chips = (
        (digit.size, digit.stride, slice_.shape[digit.axis], slice_.wrap[digit.axis])
        for digit in group.digits
        if digit.axis != CORE_AXIS
    )
    return (cores, *sorted(chips))


def compare(topology: str, shape: tuple[int, ...]) -> Comparison:
    """Compile the all_gather of every axis of every layout. To be run in a process of its own."""
    system = System.parse(topology)
    compiler = Compiler(system)
    row_major = RankMap.row_major(system)
    times: dict[tuple[object, ...], float] = {}

    def time_of(layout: MeshLayout, axis: int) -> float:
        key = kind_of(layout.axes[axis].group)
        if key not in times:
            places = layout.groups(axis)
            case = Case(
                verb="all_gather",
                placement=place_group(row_major, places[0].tolist()),
                dtype=DTYPE,
                num_bytes=PAYLOAD,
            )
            program = compiler.compile(tuned_forms(case)[0], places, PAYLOAD)
            found = estimate(system, places.reshape(-1), read_program(program.text))
            times[key] = found.seconds * 1e6
        return times[key]

    weights = [INNER_WEIGHT**axis for axis in range(len(shape))]
    compared: dict[tuple[object, ...], list[float]] = {}
    for layout in every_layout(system, shape):
        key = tuple(kind_of(axis.group) for axis in layout.axes)
        if key not in compared:
            compared[key] = [time_of(layout, axis) for axis in range(len(shape))]
    own = lay_out_mesh(system, shape)

    def total(each: list[float]) -> float:
        return sum(weight * time for weight, time in zip(weights, each, strict=True))

    return Comparison(
        chosen=[time_of(own, axis) for axis in range(len(shape))],
        best=min(compared.values(), key=total),
        least=[min(each[axis] for each in compared.values()) for axis in range(len(shape))],
        layouts=len(compared),
        programs=len(times),
    )


def compare_apart(topology: str, shape: tuple[int, ...]) -> Comparison:
    """Do the same in a process of its own, which has libtpu's compiler."""
    done = subprocess.run(
        [sys.executable, __file__, topology, ",".join(map(str, shape))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **COMPILER_ENVIRONMENT},
    )
    return Comparison(**json.loads(done.stdout.splitlines()[-1]))


def layout_table(meshes: tuple[tuple[str, tuple[int, ...]], ...]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| slice | mesh | layouts, programs | chosen | best | chosen over best |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for topology, shape in meshes:
        found = compare_apart(topology, shape)
        chosen, best = (
            ", ".join(f"{time:,.0f} us" for time in each) for each in (found.chosen, found.best)
        )
        print(f"{topology} {shape}: {found}", file=sys.stderr, flush=True)
        yield (
            f"| {topology} | {shape} | {found.layouts}, {found.programs} | {chosen} | {best} "
            f"| {found.worst:.3f} |"
        )


if __name__ == "__main__":
    os.environ.update(COMPILER_ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")  # libtpu writes on stdout what it likes
    os.dup2(2, 1)
    found = compare(sys.argv[1], tuple(map(int, sys.argv[2].split(","))))
    print(json.dumps(found.__dict__), file=answers, flush=True)
