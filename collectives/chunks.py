"""Cutting payloads into pieces of few sizes, so that few programs serve every shape.

A program is compiled for one size. Training loops with ever-changing sizes (MoE splits, pickled
objects) would compile for ever; so payloads are cut into full chunks and a rest, and the rest is
rounded up on a ladder with four rungs an octave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SMALLEST = 1024  # elements of a rest are rounded up to this at least


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, start + length) of a payload, run by a program for `size` elements."""

    start: int
    length: int
    size: int


def ladder_size(length: int, largest: int) -> int:
    """The least rung that holds `length` elements: k * 2**m with k in 4..7, at most `largest`."""
    if length >= largest:
        return largest
    if length <= SMALLEST:
        return min(SMALLEST, largest)
    exponent = (length - 1).bit_length() - 3
    step = 1 << exponent
    return min(-(-length // step) * step, largest)


def pieces(length: int, num_pieces: int, largest: int) -> Iterator[list[Chunk]]:
    """Cut `length` elements into rounds of `num_pieces` chunks of one size, at most `largest`.

    Chunks at the end may be short, or empty.
    """
    for start in range(0, length, num_pieces * largest):
        rest = min(num_pieces * largest, length - start)
        size = ladder_size(-(-rest // num_pieces), largest)
        starts = [start + piece * size for piece in range(num_pieces)]
        yield [Chunk(at, max(0, min(size, start + rest - at)), size) for at in starts]


def chunks(length: int, largest: int) -> Iterator[Chunk]:
    """Cut `length` elements into chunks of at most `largest`; none for 0."""
    for start in range(0, length, largest):
        rest = min(largest, length - start)
        yield Chunk(start, rest, ladder_size(rest, largest))
