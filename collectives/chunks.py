"""Cutting payloads into pieces of few sizes, so that few programs serve every shape.

A program is compiled for one size. Training loops with ever-changing sizes (MoE splits, pickled
objects) would compile for ever; so payloads are cut into full chunks and a rest, and the rest is
rounded up on a ladder with four rungs an octave. On the device padding is a copy, so sizes that
come again get programs of their own there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

_NO_LIMIT = 1 << 62
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


Rounding = Callable[[int, int], int]
"""From a length, and the largest size there is, to the size of the program that runs it."""


@dataclass(slots=True)
class ExactSizes:
    """Which sizes have programs of their own, so that payloads on the device need no padding.

    A size gets one when it is seen for the second time: sizes that never come again, of pickled
    objects and the like, compile nothing. All ranks of a lane run the same, so they count the same.
    """

    limit: int = 256
    _seen: Counter[Hashable] = field(default_factory=Counter)
    _exact: set[Hashable] = field(default_factory=set)

    def admit(self, size: Hashable) -> bool:
        """Whether `size` has a program of its own, from now on or since earlier."""
        if size in self._exact:
            return True
        self._seen[size] += 1
        if self._seen[size] < 2 or len(self._exact) >= self.limit:
            if len(self._seen) > 16 * self.limit:  # the rarest sizes are the newest, or never again
                self._seen.clear()
            return False
        self._exact.add(size)
        del self._seen[size]
        return True

    def rounding(self, what: Hashable) -> Rounding:
        """How sizes of `what`, which tells one kind of program from another, are rounded."""

        def rounded(length: int, largest: int) -> int:
            if self.admit((what, length)):
                return length
            return ladder_size(length, _NO_LIMIT)

        return rounded


def pieces(length: int, num_pieces: int, largest: int) -> Iterator[list[Chunk]]:
    """Cut `length` elements into rounds of `num_pieces` chunks of one size, at most `largest`.

    Chunks at the end may be short, or empty.
    """
    for start in range(0, length, num_pieces * largest):
        rest = min(num_pieces * largest, length - start)
        size = ladder_size(-(-rest // num_pieces), largest)
        starts = [start + piece * size for piece in range(num_pieces)]
        yield [Chunk(at, max(0, min(size, start + rest - at)), size) for at in starts]


def chunks(length: int, largest: int, rounded: Rounding = ladder_size) -> Iterator[Chunk]:
    """Cut `length` elements into chunks of at most `largest`; none for 0."""
    for start in range(0, length, largest):
        rest = min(largest, length - start)
        yield Chunk(start, rest, rounded(rest, largest))
