"""Chunks: payloads are covered exactly, by programs of few sizes."""

from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.collectives.chunks import SMALLEST, ExactSizes, chunks, ladder_size

LENGTHS = st.integers(0, 3_000_000)
LARGEST = st.sampled_from([1024, 4096, 65536, 87_040, 262_144, 1 << 20, 4 << 20, 1 << 40])


@given(LENGTHS, LARGEST)
def test_chunks_cover_every_element_once_and_in_order(length: int, largest: int) -> None:
    covered = 0
    for chunk in chunks(length, largest):
        assert chunk.start == covered
        assert 0 < chunk.length <= chunk.size <= largest
        covered += chunk.length
    assert covered == length


@given(LENGTHS, LARGEST)
def test_all_chunks_but_the_last_are_full(length: int, largest: int) -> None:
    cut = list(chunks(length, largest))
    assert all((chunk.length, chunk.size) == (largest, largest) for chunk in cut[:-1])


def test_nothing_is_cut_into_no_chunks() -> None:
    assert list(chunks(0, 1024)) == []


@given(st.integers(SMALLEST + 1, 1 << 40))
def test_a_rest_is_padded_by_less_than_a_quarter(length: int) -> None:
    size = ladder_size(length, 1 << 41)
    assert length <= size < length * 1.25


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_longer_rests_never_get_smaller_programs(first: int, second: int) -> None:
    shorter, longer = sorted((first, second))
    assert ladder_size(shorter, 1 << 41) <= ladder_size(longer, 1 << 41)


@given(st.integers(1, 1 << 41))
def test_a_rung_is_its_own_size(length: int) -> None:
    rung = ladder_size(length, 1 << 41)
    assert ladder_size(rung, 1 << 41) == rung


def test_a_million_lengths_need_few_programs() -> None:
    sizes = {ladder_size(length, 1 << 20) for length in range(1, (1 << 20) + 1, 7)}
    assert len(sizes) <= 4 * 10 + 1  # four an octave, from 2**10 to 2**20


@given(st.integers(SMALLEST + 1, 1 << 20))
def test_rests_keep_the_alignment_of_what_follows_them(length: int) -> None:
    assert ladder_size(length, 1 << 20) % 64 == 0


def test_a_size_is_exact_from_its_second_time_on() -> None:
    rounded = ExactSizes().rounding("all_reduce float32")
    assert [rounded(5001, 8192) for _ in range(3)] == [5120, 5001, 5001]
    assert rounded(5002, 8192) == 5120


def test_kinds_of_programs_are_counted_apart() -> None:
    sizes = ExactSizes()
    assert sizes.rounding("a")(5001, 8192) == sizes.rounding("b")(5001, 8192) == 5120


def test_there_are_no_more_exact_sizes_than_the_limit() -> None:
    rounded = ExactSizes(limit=3).rounding("all_reduce float32")
    exact = {size for size in range(5000, 5010) for _ in range(3) if rounded(size, 8192) == size}
    assert len(exact) == 3


def test_sizes_that_never_come_again_are_forgotten() -> None:
    sizes = ExactSizes(limit=2)
    for size in range(5000, 5100):
        sizes.admit(size)
    assert len(sizes._seen) <= 2 * 16 + 1
