"""What a mesh's collectives will do on a slice: each is compiled for it, read and estimated.

As a program (``python -m tpu_dist.collectives.planner``) it takes a plan on stdin and answers each
case that it is asked for with a line of JSON. The compiler may end it: start another then. What was
compiled once, with the same versions, flags and code, is answered from a cache on disk.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from tpu_dist.collectives.ahead_of_time import (
    COMPILER_ENVIRONMENT,
    DTYPE,
    Compiler,
    naive_places,
    tuned_places,
)
from tpu_dist.collectives.compiled_program import read_program
from tpu_dist.collectives.ici_model import estimate, ideal_seconds
from tpu_dist.collectives.plan_cache import PlanCache
from tpu_dist.collectives.tuned_forms import TunedForm, flat_form
from tpu_dist.collectives.tuning import Case, tuned_forms
from tpu_dist.runtime.environment import cache_directory
from tpu_dist.topology.errors import TpuDistError
from tpu_dist.topology.mesh_layout import MeshLayout
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.placement import place_group
from tpu_dist.topology.rank_map import Numbers, RankMap
from tpu_dist.topology.system import System

NAIVE = "naive"
TUNED = "tuned"

_GOOD_ENOUGH = 0.99  # of the ideal: no further candidate is compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one collective does, as written to JSON.

    Attributes:
        axis: of the mesh; ``all`` where the whole slice is the one axis.
        verb: all_reduce, all_gather or reduce_scatter.
        form: naive or tuned.
        bytes: of the payload (the gathered, the reduced, the one to be scattered), rounded up to
            whole tiles for each member.
        algorithm: as read from the compiled program.
        links_used: by each chip, one way.
        modelled_us: by the model of `ici_model`; latency and HBM are not in it.
        ideal_us: if the axis used every link that its layout has.
        efficiency: the ideal over the modelled.
        temp_bytes: that the program needs on a device.
        compile_s: of all the candidates that were compiled.
    """

    axis: str
    verb: str
    form: str
    bytes: int
    algorithm: str
    links_used: float
    modelled_us: float
    ideal_us: float
    efficiency: float
    temp_bytes: int
    compile_s: float

    def as_json(self) -> dict[str, Any]:
        """Return it as written."""
        return {name: getattr(self, name) for name in self.__slots__}


class Planner:
    """Plans the collectives of one mesh on one system."""

    def __init__(
        self,
        system: System,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        *,
        cache: PlanCache | None = None,
    ) -> None:
        """Lay the mesh out, and describe the system to the compiler unless that is known to go.

        Raises:
            TopologyError: the mesh does not fit.
            UnsupportedError: the system cannot be compiled for.
        """
        self._layout: MeshLayout = lay_out_mesh(system, sizes, names=names)
        self._cache = cache
        self._compiler: Compiler | None = None
        described = {"described": str(system)}
        if cache is None or cache.get(described) is None:
            self._compiler = Compiler(system)
            if cache is not None:
                cache.put(described, True)

    @property
    def layout(self) -> MeshLayout:
        """Where the mesh's axes are laid."""
        return self._layout

    def row(self, axis: int, verb: str, form: str, num_bytes: int) -> tuple[Row, bool]:
        """Return what one collective does, and whether that was known. Blocking, for seconds."""
        if self._cache is None:
            return self._compiled_row(axis, verb, form, num_bytes), False
        asked = {
            "topology": str(self._layout.system),
            "mesh": self._layout.shape,
            "axis": axis,
            "verb": verb,
            "form": form,
            "dtype": DTYPE,
            "bytes": num_bytes,
        }
        known = self._cache.get(asked)
        if known is not None:
            return Row(**{**known, "axis": self._layout.axes[axis].name}), True
        row = self._compiled_row(axis, verb, form, num_bytes)
        self._cache.put(asked, row.as_json())
        return row, False

    def _compiled_row(self, axis: int, verb: str, form: str, num_bytes: int) -> Row:
        layout = self._layout
        flat = flat_form(verb, layout.shape[axis])
        if form == NAIVE:
            places = naive_places(layout.system, layout.shape, axis)
            candidates: tuple[TunedForm, ...] = (flat,)
        else:
            places = tuned_places(layout, axis)
            row_major = RankMap.row_major(layout.system)
            case = Case(
                verb=verb,
                placement=place_group(row_major, places[0].tolist()),
                dtype=DTYPE,
                num_bytes=num_bytes,
            )
            candidates = (*tuned_forms(case), flat)
        best: Row | None = None
        seconds = 0.0
        for candidate in candidates:
            row = self._compiled(axis, form, candidate, places, num_bytes)
            seconds += row.compile_s
            if best is None or row.modelled_us < best.modelled_us:
                best = row
            if best.efficiency >= _GOOD_ENOUGH:
                break
        assert best is not None, "each verb has candidates"
        return Row(**{**best.as_json(), "compile_s": round(seconds, 2)})

    def _compiled(
        self, axis: int, form: str, candidate: TunedForm, places: Numbers, num_bytes: int
    ) -> Row:
        layout = self._layout
        if self._compiler is None:
            self._compiler = Compiler(layout.system)
        program = self._compiler.compile(candidate, places, num_bytes)
        found = estimate(layout.system, places.reshape(-1), read_program(program.text))
        laid = layout.axes[axis]
        ideal = ideal_seconds(
            laid.group, candidate.verb, program.num_bytes, num_slices=laid.num_slices
        )
        return Row(
            axis=layout.axes[axis].name,
            verb=candidate.verb,
            form=form,
            bytes=program.num_bytes,
            algorithm=found.algorithm or "within a chip",
            links_used=round(found.links, 3),
            modelled_us=round(found.seconds * 1e6, 3),
            ideal_us=round(ideal * 1e6, 3),
            efficiency=round(ideal / found.seconds, 4) if found.seconds else 1.0,
            temp_bytes=program.temp_bytes,
            compile_s=program.seconds,
        )


def answer(
    plan: Mapping[str, Any], cases: Iterator[str], cache: PlanCache | None = None
) -> Iterator[dict[str, Any]]:
    """Yield an answer to the plan, then one to each case: ``row`` or ``failed``, and ``notes``.

    Args:
        plan: ``{"topology", "mesh": {name: size}}``.
        cases: each ``{"axis": index, "verb", "form", "bytes"}`` as JSON.
        cache: of results; None to compile everything.
    """

    def notes() -> list[str]:
        return [] if cache is None else cache.take_notes()

    try:
        mesh = plan["mesh"]
        system = System.parse(plan["topology"])
        planner = Planner(system, tuple(mesh), tuple(mesh.values()), cache=cache)
    except (TpuDistError, ValueError) as error:
        yield {"error": str(error)}
        return
    yield {"axes": [str(axis) for axis in planner.layout.axes], "notes": notes()}
    for line in cases:
        case = json.loads(line)
        try:
            row, known = planner.row(case["axis"], case["verb"], case["form"], case["bytes"])
        except Exception as error:  # the edge to libtpu: a compile fails with errors of any kind
            text = str(error).strip().splitlines() or [type(error).__name__]
            yield {"failed": text[0][:300], "notes": notes()}
        else:
            yield {"row": row.as_json(), "known": known, "notes": notes()}


def main(source: TextIO, sink: TextIO, environ: Mapping[str, str]) -> None:
    """Answer a plan, a line for a line."""
    plan = json.loads(source.readline())
    cache = PlanCache(cache_directory(environ), environ) if plan.get("cache", True) else None
    for each in answer(plan, iter(source.readline, ""), cache):
        print(json.dumps(each), file=sink, flush=True)


if __name__ == "__main__":
    for _name, _value in COMPILER_ENVIRONMENT.items():
        os.environ[_name] = _value
    # libtpu writes on stdout and stderr what it likes: answers go where only we write.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.stdin, _answers, os.environ)
