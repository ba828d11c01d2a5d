"""Tuned forms: what they compute, on CPU devices and against numpy, and when which is tried."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tpu_dist.collectives.tuned_forms import VERBS, tuned_forms
from tpu_dist.errors import UnsupportedError
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.system import System

# In a process of its own, with 8 CPU devices: two groups of four, as 2x2 digits.
COMPUTE = """
import itertools, json
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
from tpu_dist.collectives.tuned_forms import TunedForm
from tpu_dist.topology.groups import Digit

digits = (Digit(axis=0, size=2), Digit(axis=1, size=2))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("groups", "a", "b"))
spec = PartitionSpec(("groups", "a", "b"))
wrong = []
for verb, lanes, phases in itertools.product(
    ("all_reduce", "all_gather", "reduce_scatter"), (None, 128, 1024),
    (((0, 1),), ((0,), (1,)), ((1,), (0,))),
):
    if len(phases) > 1 and verb != "reduce_scatter":
        continue
    form = TunedForm(verb=verb, digits=digits, phases=phases, lanes=lanes)
    local = 4 * 8 * 1024
    values = np.random.default_rng(0).integers(-9, 9, (8, local)).astype(np.float32)
    run = jax.jit(jax.shard_map(form.function(("a", "b")), mesh=mesh, in_specs=spec,
                                out_specs=spec, check_vma=False))
    found = np.asarray(run(values.reshape(-1))).reshape(8, -1)
    groups = values.reshape(2, 4, local)
    whole = {
        "all_reduce": np.repeat(groups.sum(1), 4, axis=0),
        "all_gather": np.repeat(groups.reshape(2, -1), 4, axis=0),
        "reduce_scatter": groups.sum(1).reshape(8, -1),
    }[verb]
    if found.shape != whole.shape or not (found == whole).all():
        wrong.append([verb, lanes, phases])
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


def phases(topology: str) -> list[tuple[int, ...]]:
    system = System.parse(topology)
    group = lay_out_mesh(system, (system.num_devices,)).axes[0].group
    return list(tuned_forms("reduce_scatter", group)[0].phases)


def test_large_slices_scatter_in_phases() -> None:
    assert phases("tpu7x:4x4x4") == [(0, 1, 2, 3)]
    assert phases("tpu7x:8x8x16") == [(0, 1, 2, 3)]  # 2,048 devices
    assert phases("tpu7x:8x16x16") == [(1, 2, 3), (0,)]
    assert phases("tpu7x:16x16x32") == [(1, 2, 3), (0,)]
    assert phases("v5p:16x20x28") == [(1, 2), (0,)]
    assert phases("tpu7x:4x4x576") == [(0, 1, 3), (2,)]


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v5p:4x4x4", "tpu7x:4x4x4"])
def test_every_verb_has_forms_on_every_generation_that_was_read(topology: str) -> None:
    system = System.parse(topology)
    for axis in lay_out_mesh(system, (4, system.num_devices // 4)).axes:
        for verb in VERBS:
            forms = tuned_forms(verb, axis.group)
            assert forms
            for form in forms:
                assert all(isinstance(value, bool) for value in form.options.values())
                assert sorted(i for phase in form.phases for i in phase) == list(
                    range(len(axis.group.digits))
                )


def test_what_was_not_read_is_refused_by_name() -> None:
    group = lay_out_mesh(System.parse("v4:4x4x4"), (64,)).axes[0].group
    with pytest.raises(UnsupportedError, match="no compiled programs of v4.*v5e, v5p"):
        tuned_forms("all_reduce", group)
    group = lay_out_mesh(System.parse("v6e:4x4"), (16,)).axes[0].group
    with pytest.raises(UnsupportedError, match="'broadcast' has no tuned form"):
        tuned_forms("broadcast", group)
