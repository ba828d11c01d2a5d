"""Which degrees of parallelism a model gets on a slice."""

import math
from dataclasses import replace

import pytest

from tpu_dist.recipes.titan.pods import Degrees, ModelSize, choose_degrees
from tpu_dist.topology.errors import TopologyError
from tpu_dist.topology.mesh_search import lay_out_mesh
from tpu_dist.topology.system import System

SMALL = ModelSize(
    name="small",
    num_parameters=8_000_000_000,
    num_kv_heads=8,
    sequence_length=8192,
    max_batch_tokens=4 * 2**20,
)
LARGE = replace(SMALL, name="large", num_parameters=405_000_000_000, max_batch_tokens=16 * 2**20)
MIXED = replace(SMALL, name="mixed", num_parameters=30_000_000_000, num_experts=96)


@pytest.mark.parametrize(
    ("topology", "model", "expected"),
    [
        ("v5p:2x2x1", SMALL, (1, 4, 1, 1)),
        ("v6e:16x16", SMALL, (1, 256, 1, 1)),
        ("v5p:4x4x4*2", SMALL, (2, 64, 1, 1)),  # only gradients cross DCN
        ("v5p:8x8x16", SMALL, (1, 512, 2, 1)),  # 512 sequences a step
        ("v5p:8x8x16", LARGE, (1, 1024, 1, 1)),
        ("tpu7x:16x16x16", LARGE, (1, 2048, 4, 1)),  # two devices a chip
        ("v5e:16x16*4", LARGE, (1, 1024, 1, 1)),  # no slice holds it
        ("v5p:4x4x4", MIXED, (1, 64, 1, 32)),  # 96 experts are 3 x 32
        ("v5p:8x8x8", replace(MIXED, num_experts=256), (1, 512, 1, 64)),
    ],
)
def test_degrees(topology: str, model: ModelSize, expected: tuple[int, int, int, int]) -> None:
    system = System.parse(topology)
    degrees = choose_degrees(system, model)
    replicate, shard, tensor, expert = expected
    assert degrees == Degrees(replicate=replicate, shard=shard, tensor=tensor, expert=expert)
    mesh = degrees.mesh()
    assert math.prod(mesh.values()) == system.num_devices
    lay_out_mesh(system, tuple(mesh.values()), names=tuple(mesh))


def test_a_model_that_does_not_fit_is_refused_with_what_it_takes() -> None:
    with pytest.raises(TopologyError, match=r"large has 6,035 GiB .* at least 629 devices of v5e"):
        choose_degrees(System.parse("v5e:16x16"), LARGE)


def test_more_devices_than_there_is_work_for_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"has 8192 devices, and small has work for 4096"):
        choose_degrees(System.parse("tpu7x:16x16x16"), SMALL)
