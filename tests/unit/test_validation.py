"""What a rank sees to be wrong by itself is refused by name, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist import _validation as validation
from tpu_dist.errors import UnsupportedError


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: [1.0], TypeError, "must be a torch.Tensor, got list"),
        (lambda: None, TypeError, "must be a torch.Tensor, got NoneType"),
        (lambda: torch.empty(3, device="meta"), ValueError, "on device meta.*materialise it first"),
        (lambda: torch.eye(3).to_sparse_csr(), ValueError, "layout torch.sparse_csr"),
        (lambda: torch.eye(3).to_sparse(), ValueError, "layout torch.sparse_coo"),
        (
            lambda: torch.zeros(3, dtype=torch.complex32),
            UnsupportedError,
            "do not carry torch.complex32",
        ),
    ],
    ids=["list", "None", "meta", "csr", "coo", "dtype"],
)
def test_a_tensor_that_cannot_be_sent_is_refused(
    make: Callable[[], object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        validation.check_tensor("all_gather", make(), "input")


def test_the_verb_and_the_role_are_named() -> None:
    with pytest.raises(TypeError, match="^all_gather: the_input must"):
        validation.check_tensor("all_gather", 3, "the_input")


@pytest.mark.parametrize(
    ("tensors", "kind", "said"),
    [
        ([torch.zeros(1)], ValueError, "one tensor for each of the 2 ranks, got 1"),
        ([torch.zeros(1)] * 3, ValueError, "one tensor for each of the 2 ranks, got 3"),
        ([torch.zeros(1), torch.zeros(1).int()], ValueError, "one dtype, got torch.float32, .*32"),
        ([torch.zeros(1), 1], TypeError, r"outputs\[1\] must be a torch.Tensor, got int"),
        (5, TypeError, "a list of tensors, got int"),
    ],
    ids=str,
)
def test_a_list_that_does_not_fit_is_refused(
    tensors: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        validation.check_tensors("all_gather", tensors, "outputs", count=2)


def test_a_list_of_one_is_unpacked_and_others_refused() -> None:
    tensor = torch.zeros(1)
    assert validation.only("reduce", [tensor], "tensors") is tensor
    assert validation.only("reduce", tensor, "tensors") is tensor
    with pytest.raises(ValueError, match="must hold one element, got 2"):
        validation.only("reduce", [tensor, tensor], "tensors")
    with pytest.raises(ValueError, match="must hold one element, got 0"):
        validation.only("reduce", [], "tensors")


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_outside_of_the_group_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"the root is {rank}, outside of .* 0 to 3"):
        validation.check_rank("broadcast", rank, 4, "the root")
    assert [validation.check_rank("broadcast", r, 4, "the root") for r in range(4)] == [0, 1, 2, 3]


def test_counts_and_dtypes_are_compared() -> None:
    with pytest.raises(ValueError, match=r"output of shape \(2, 3\) has 6 elements, 8 are needed"):
        validation.check_count("all_gather", torch.zeros(2, 3), "output", 8, "2 times the input's")
    with pytest.raises(ValueError, match="output is torch.int32, input is torch.float32"):
        validation.check_same_kind("all_gather", torch.zeros(1).int(), torch.zeros(1))


@pytest.mark.parametrize(
    ("shape", "splits", "said"),
    [
        ((7, 2), [], "7 rows of input cannot be divided among 3 ranks"),
        ((), [], "1 rows of input cannot be divided"),
        ((7,), [3, 4], "one size for each of the 3 ranks, got 2"),
        ((7,), [1, 2, 3], r"\[1, 2, 3\] must be non-negative and sum up to the 7 rows.*up to 6"),
        ((7,), [-1, 4, 4], "must be non-negative"),
    ],
    ids=str,
)
def test_splits_that_do_not_fit_are_refused(
    shape: tuple[int, ...], splits: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        validation.split_sizes("all_to_all", torch.zeros(shape), splits, 3, "input")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5), st.booleans())
def test_splits_are_rows_and_sizes_are_elements(rows: list[int], width: int, flat: bool) -> None:
    shape = (sum(rows),) if flat else (sum(rows), width)
    sizes = validation.split_sizes("all_to_all", torch.zeros(shape), rows, len(rows), "input")
    assert sizes == [row * (1 if flat else width) for row in rows]


def test_without_splits_the_rows_are_dealt_evenly() -> None:
    def even(*shape: int) -> list[int]:
        return validation.split_sizes("all_to_all", torch.zeros(shape), [], 3, "input")

    assert even(6, 5) == [10, 10, 10]
    assert even(0, 5) == [0, 0, 0]
    assert even(3, 0) == [0, 0, 0]


def test_an_expanded_output_is_refused() -> None:
    with pytest.raises(ValueError, match="elements share memory"):
        validation.check_output("all_reduce", torch.zeros(1).expand(4))


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3), (1, 1), ()])
def test_strides_of_empty_and_single_elements_say_nothing(shape: tuple[int, ...]) -> None:
    output = torch.zeros(1).as_strided(shape, [0] * len(shape))
    assert validation.check_output("all_gather", output) is output
