"""The border on JAX's own CPU device: the way that shares memory, and the one for TPUs."""

import jax
import pytest
import torch

from tpu_dist.collectives import border
from tpu_dist.collectives.dtypes import WIRE_TYPES, WireType

NUM_ELEMENTS = 300


def bits(wire: WireType) -> torch.Tensor:
    count = NUM_ELEMENTS * wire.carrier.itemsize
    pattern = torch.arange(count, dtype=torch.int64).mul(7).to(torch.uint8)
    return pattern.view(wire.carrier) if wire.carrier != torch.bool else pattern > 99


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("wire", WIRE_TYPES.values(), ids=lambda wire: wire.name)
@pytest.mark.parametrize(
    ("enter", "leave"),
    [(border._share, border._copy_memory), (border._upload, border._download)],
    ids=["shared", "copied"],
)
def test_what_enters_leaves(enter, leave, wire: WireType, offset: int) -> None:  # type: ignore[no-untyped-def]
    device = jax.devices("cpu")[0]
    source = bits(wire)[offset:]
    array = enter(source, device)
    assert array.shape == (NUM_ELEMENTS - offset,)
    assert str(array.dtype) == str(wire.carrier).removeprefix("torch.")
    target = torch.zeros(NUM_ELEMENTS - 50, dtype=wire.carrier)
    leave(array, target[:-10])
    assert border.raw(target[:-10]).equal(border.raw(source[: target.numel() - 10]))
    assert not border.raw(target[-10:]).any(), "it wrote past the end"


def test_what_is_aligned_is_shared() -> None:
    device = jax.devices("cpu")[0]
    source = torch.zeros(64, dtype=torch.int32)
    array = border.to_array(source, device)
    source.fill_(7)
    target = torch.empty_like(source)
    border.copy_out(array, target, device)
    assert target.eq(7).all()
