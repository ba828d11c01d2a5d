"""Tuned forms: what they compute, on CPU devices and against numpy, and when which is tried."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tpu_dist.collectives.tuned_forms import FUNCTIONS, TunedForm
from tpu_dist.collectives.tuning import OPTIONS, VERBS, Case, tuned_forms
from tpu_dist.errors import UnsupportedError
from tpu_dist.topology.generations import GENERATIONS
from tpu_dist.topology.placement import place_group
from tpu_dist.topology.rank_map import RankMap
from tpu_dist.topology.system import System

# In a process of its own, with 8 CPU devices: two groups of four, as 2x2 digits, and one group of
# two slices of four.
COMPUTE = """
import itertools, json
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
from tpu_dist.collectives.tuned_forms import FUNCTIONS, TunedForm
from tpu_dist.topology.groups import Digit

digits = (Digit(axis=0, size=2), Digit(axis=1, size=2))
wrong = []
for verb, lanes, phases, num_slices, root in itertools.product(
    FUNCTIONS, (None, 128, 1024), (((0, 1),), ((0,), (1,)), ((1,), (0,))), (1, 2), (0, 3),
):
    if len(phases) > 1 and verb not in ("reduce_scatter", "scatter"):
        continue
    form = TunedForm(
        verb=verb, digits=digits, phases=phases, lanes=lanes, num_slices=num_slices, root=root,
        by_exchange=lanes == 128 and phases == ((1,), (0,)),
    )
    members = form.num_members
    mesh = Mesh(np.array(jax.devices()).reshape(-1, *form.sizes), ("groups", *form.names))
    spec = PartitionSpec(("groups", *form.names))
    local = 8 * 8 * 1024
    values = np.random.default_rng(0).integers(-9, 9, (8, local)).astype(np.float32)
    run = jax.jit(jax.shard_map(form.function(), mesh=mesh, in_specs=spec,
                                out_specs=spec, check_vma=False))
    found = np.asarray(run(values.reshape(-1))).reshape(8, -1)
    groups = values.reshape(-1, members, local)
    each = lambda whole: np.repeat(whole, members, axis=0)
    whole = {
        "all_reduce": each(groups.sum(1)),
        "all_gather": each(groups.reshape(8 // members, -1)),
        "reduce_scatter": groups.sum(1).reshape(8, -1),
        "broadcast": each(groups[:, root]),
        "scatter": groups[:, root].reshape(8, -1),
        "all_to_all": groups.reshape(8 // members, members, members, -1).swapaxes(1, 2),
    }[verb].reshape(8, -1)
    if found.shape != whole.shape or not (found == whole).all():
        wrong.append([verb, lanes, phases, num_slices, root])
print(json.dumps(wrong))
"""


def test_every_form_computes_its_verb() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            "PATH": "",
            "PYTHONPATH": ":".join(sys.path),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []


def forms_of(
    topology: str, verb: str, ranks: range | list[int] | None = None, num_bytes: int = 64 << 20
) -> tuple[TunedForm, ...]:
    system = System.parse(topology)
    placement = place_group(RankMap.row_major(system), ranks or range(system.num_devices))
    case = Case(verb=verb, placement=placement, dtype="float32", num_bytes=num_bytes)
    return tuned_forms(case)


def phases(topology: str) -> list[tuple[int, ...]]:
    return list(forms_of(topology, "reduce_scatter")[0].phases)


def test_large_slices_scatter_in_phases() -> None:
    assert phases("tpu7x:4x4x4") == [(0, 1, 2, 3)]
    assert phases("tpu7x:8x8x16") == [(0, 1, 2, 3)]  # 2,048 devices
    assert phases("tpu7x:8x16x16") == [(1, 2, 3), (0,)]
    assert phases("tpu7x:16x16x32") == [(1, 2, 3), (0,)]
    assert phases("v5p:16x20x28") == [(1, 2), (0,)]
    assert phases("tpu7x:4x4x576") == [(0, 1, 3), (2,)]


GROUPS = [None, [0, 1, 2, 3], [0, 4, 8, 12], [0, 5], [1, 2, 4]]
"""All, what a mesh may have as an axis, and what is no block."""


@pytest.mark.parametrize("topology", ["v2:4x4", "v4:4x4x4", "v5e:4x4", "v6e:4x4", "v5p:4x4x4"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("slices", ["", "*3"])
def test_every_verb_has_a_form_in_every_group(topology: str, verb: str, slices: str) -> None:
    system = System.parse(topology + slices)
    for ranks in GROUPS:
        for form in forms_of(topology + slices, verb, ranks):
            assert form.num_members == len(ranks or range(system.num_devices))
            assert all(isinstance(value, bool) for value in form.options.values())
            every = sorted(i for phase in form.phases for i in phase)
            assert every == list(range(len(form.digits)))


def test_members_in_several_slices_are_done_in_two() -> None:
    (form, *_) = forms_of("v6e:4x4*2", "all_reduce")
    assert (form.num_slices, form.sizes) == (2, (2, 4, 4))
    (alike, *_) = forms_of("v6e:4x4*2", "all_reduce", [0, 1, 16, 17])
    assert (alike.num_slices, alike.sizes) == (2, (2, 2))
    (unlike, *_) = forms_of("v6e:4x4*2", "all_reduce", [0, 1, 16, 18])
    assert (unlike.num_slices, unlike.sizes) == (1, (4,))


def test_an_odd_number_of_members_exchanges_instead_of_scattering() -> None:
    for ranks in ([0, 1, 2], [0, 1, 4, 5, 8]):
        for verb in ("reduce_scatter", "scatter"):
            assert all(form.by_exchange for form in forms_of("v5p:4x4x4", verb, ranks))
    assert not any(form.by_exchange for form in forms_of("v5p:4x4x4", "reduce_scatter"))


def test_the_table_is_about_what_exists() -> None:
    assert set(VERBS) == set(FUNCTIONS)
    assert set(OPTIONS) == set(GENERATIONS)
    for options in OPTIONS.values():
        assert set(options) <= set(VERBS)


def test_what_has_no_form_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'barrier' has no tuned form; all_reduce, "):
        forms_of("v6e:4x4", "barrier")
