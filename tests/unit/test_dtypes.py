"""The table of dtypes that cross, and the border between torch and JAX."""

import pytest
import torch

from tpu_dist.collectives.border import carry, flat, raw
from tpu_dist.collectives.dtypes import NAMES_BY_CODE, WIRE_TYPES, Kind, wire_type
from tpu_dist.errors import UnsupportedError

DTYPES = list(WIRE_TYPES)


def kind_of(dtype: torch.dtype) -> Kind:
    if dtype is torch.bool:
        return Kind.BOOL
    if dtype.is_complex:
        return Kind.COMPLEX
    return Kind.FLOAT if dtype.is_floating_point else Kind.INTEGER


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kind_is_what_torch_says(dtype: torch.dtype) -> None:
    assert wire_type(dtype).kind is kind_of(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_carrier_has_the_same_width(dtype: torch.dtype) -> None:
    assert wire_type(dtype).carrier.itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_carrier_can_cross_by_dlpack(dtype: torch.dtype) -> None:
    carrier = wire_type(dtype).carrier
    assert torch.from_dlpack(torch.zeros(3, dtype=carrier)).dtype is carrier


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_floats_alone_accumulate_in_float32(dtype: torch.dtype) -> None:
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    assert wire_type(dtype).accumulate == ("float32" if narrow else None)


def test_codes_are_unique_and_name_their_dtype() -> None:
    assert len(NAMES_BY_CODE) == len(WIRE_TYPES)
    for dtype, wire in WIRE_TYPES.items():
        assert getattr(torch, NAMES_BY_CODE[wire.code]) is dtype
        assert 0 < wire.code < 256  # a byte of the envelope; 0 stands for none


def test_every_number_that_torch_computes_with_is_carried() -> None:
    computed = {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex)
    }
    # complex32 has no arithmetic to speak of; e8m0 and e2m1x2 are scales and packed pairs.
    left_out = {torch.complex32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}
    assert computed - left_out <= set(WIRE_TYPES)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e8m0fnu], ids=str)
def test_other_dtypes_are_refused_with_what_there_is(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=f"{dtype}.*bfloat16.*complex128"):
        wire_type(dtype)


def test_flat_shares_the_memory_of_a_dense_tensor() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert flat(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "wanted"),
    [
        (torch.tensor(3.0), [3.0]),
        (torch.arange(6.0).view(2, 3).t(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
        (torch.arange(6.0)[::2], [0.0, 2.0, 4.0]),
        (torch.ones(1).expand(3), [1.0, 1.0, 1.0]),
        (torch.empty(0, 5), []),
        (torch.empty(4, 0).t()[:, ::2], []),
        (torch.tensor([1 + 2j]).conj(), [1 - 2j]),
        (torch.tensor([1 + 2j]).conj().imag, [-2.0]),  # a view that is marked negative
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
    ],
    ids=["0-d", "transposed", "strided", "expanded", "empty", "empty view", "conj", "neg", "grad"],
)
def test_flat_is_row_major_whatever_the_view(tensor: torch.Tensor, wanted: list[complex]) -> None:
    row = flat(tensor)
    assert row.dim() == 1 and row.is_contiguous()
    assert not row.is_conj() and not row.is_neg() and not row.requires_grad
    assert row.tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_and_carriers_are_views(dtype: torch.dtype) -> None:
    row = torch.zeros(8, dtype=torch.uint8).repeat(16).view(dtype)
    assert raw(row).data_ptr() == row.data_ptr() == carry(row, wire_type(dtype)).data_ptr()
    assert raw(row).numel() == row.nbytes
