"""Pools of ranks shared by the tests of one module, see ranks.py."""

from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    """Two ranks in one process group of the backend under test."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool4() -> Iterator[RankPool]:
    """Four ranks in one process group of the backend under test."""
    with RankPool(4) as pool:
        yield pool
