"""The reduce operations: what each is defined for, and what it computes, against torch."""

from functools import reduce

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  gives numpy the narrow floats' names
import numpy as np
import pytest
import torch

from tpu_dist.collectives.dtypes import WIRE_TYPES, Kind, WireType, wire_type
from tpu_dist.collectives.reducers import NAMES_BY_CODE, REDUCERS, combine, finish, reducer_for
from tpu_dist.errors import UnsupportedError

DEFINED = {
    "SUM": set(Kind),
    "AVG": {Kind.FLOAT, Kind.INTEGER, Kind.COMPLEX},
    "PRODUCT": set(Kind),
    "MIN": {Kind.FLOAT, Kind.INTEGER, Kind.BOOL},
    "MAX": {Kind.FLOAT, Kind.INTEGER, Kind.BOOL},
    "BAND": {Kind.INTEGER, Kind.BOOL},
    "BOR": {Kind.INTEGER, Kind.BOOL},
    "BXOR": {Kind.INTEGER, Kind.BOOL},
    "PREMUL_SUM": {Kind.FLOAT, Kind.COMPLEX},
}


def reduced(name: str, wire: WireType, rows: list[object], *, on: str = "numpy") -> np.ndarray:
    """What combine() and finish() make of one array a rank."""
    reducer = reducer_for(name, wire)
    if on == "numpy":
        arrays = [np.array(row, dtype=wire.name) for row in rows]
        with np.errstate(all="ignore"):
            total = combine(reducer, wire, arrays, np)
            return finish(reducer, wire, total, len(rows), np)
    with jax.enable_x64(True):
        devices = [jnp.array(row, dtype=wire.name) for row in rows]
        total = combine(reducer, wire, devices, jnp)
        return np.asarray(finish(reducer, wire, total, len(rows), jnp))


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("dtype", WIRE_TYPES, ids=str)
def test_an_operation_is_defined_for_its_kinds_and_refused_for_others(
    name: str, dtype: torch.dtype
) -> None:
    wire = wire_type(dtype)
    if wire.kind in DEFINED[name]:
        assert reducer_for(name, wire).name == name
    else:
        with pytest.raises(UnsupportedError, match=f"{name} is not defined for {wire.name}"):
            reducer_for(name, wire)


def test_an_unknown_operation_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnsupportedError, match="ReduceOp.UNUSED is not known.*SUM, AVG.*BXOR"):
        reducer_for("UNUSED", wire_type(torch.float32))


def test_every_operation_of_c10d_is_in_the_table() -> None:
    ops = set(torch.distributed.ReduceOp.RedOpType.__members__) - {"UNUSED"}
    assert ops == set(REDUCERS) == set(DEFINED)


def test_codes_are_unique_bytes() -> None:
    assert len(NAMES_BY_CODE) == len(REDUCERS)
    assert all(0 < code < 256 for code in NAMES_BY_CODE)


@pytest.mark.parametrize("on", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_integer_averages_are_rounded_toward_zero_also_at_the_ends(dtype: str, on: str) -> None:
    lowest = torch.iinfo(getattr(torch, dtype)).min
    rows = [[-3, 3, lowest // 2, lowest // 2 + 1, 7], [-4, 4, lowest // 2, lowest // 2, 0]]
    wire = wire_type(getattr(torch, dtype))
    assert reduced("AVG", wire, rows, on=on).tolist() == [-3, 3, lowest // 2, lowest // 2 + 1, 3]


@pytest.mark.parametrize("on", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_integers_are_averaged_over_any_number_of_ranks(dtype: str, on: str) -> None:
    wire = wire_type(getattr(torch, dtype))
    rows: list[object] = [[0]] * 299 + [[100]]
    assert reduced("AVG", wire, rows, on=on).tolist() == [0]


@pytest.mark.parametrize("on", ["numpy", "jax"])
@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_truth_values_stay_truth_values(name: str, on: str) -> None:
    functions = {
        "SUM": any, "MAX": any, "BOR": any, "PRODUCT": all, "MIN": all, "BAND": all,
        "BXOR": lambda values: sum(values) % 2 == 1,
    }  # fmt: skip
    columns = [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)]
    rows: list[object] = [[column[rank] for column in columns] for rank in range(3)]
    wanted = [functions[name](column) for column in columns]
    result = reduced(name, wire_type(torch.bool), rows, on=on)
    assert result.dtype == np.bool_ and result.tolist() == wanted


@pytest.mark.parametrize("on", ["numpy", "jax"])
@pytest.mark.parametrize("name", ["MIN", "MAX", "SUM", "PRODUCT"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e5m2"])
def test_nan_of_any_rank_is_everybodys(name: str, dtype: str, on: str) -> None:
    wire = wire_type(getattr(torch, dtype))
    nan = float("nan")
    result = reduced(name, wire, [[1, nan, 1], [nan, 1, 1], [1, 1, 1]], on=on)
    assert np.isnan(result.astype("float32")).tolist() == [True, True, False]


@pytest.mark.parametrize("on", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_floats_are_summed_wide_and_rounded_once(dtype: str, on: str) -> None:
    torch_dtype = getattr(torch, dtype)
    rows = [torch.rand(64).to(torch_dtype).tolist() for _ in range(9)]
    wanted = reduce(torch.add, [torch.tensor(row) for row in rows]).to(torch_dtype)
    result = reduced("SUM", wire_type(torch_dtype), rows, on=on)
    assert torch.tensor(result.astype("float32")).equal(wanted.float())


@pytest.mark.parametrize("on", ["numpy", "jax"])
def test_integers_wrap_around_as_torchs_do(on: str) -> None:
    rows: list[object] = [[100, -100], [100, -100]]
    wanted = (torch.tensor(rows[0], dtype=torch.int8) * 2).tolist()
    assert reduced("SUM", wire_type(torch.int8), rows, on=on).tolist() == wanted


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("dtype", WIRE_TYPES, ids=str)
def test_numpy_and_jax_compute_the_same(name: str, dtype: torch.dtype) -> None:
    wire = wire_type(dtype)
    if wire.kind not in DEFINED[name]:
        pytest.skip("not defined")
    rows: list[object] = [[1, 0, 2, 1], [1, 1, 3, 0], [0, 1, 1, 1]]
    here, there = reduced(name, wire, rows), reduced(name, wire, rows, on="jax")
    assert here.dtype == there.dtype == np.dtype(wire.name)
    assert here.tobytes() == there.tobytes()
