"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes for `pool.run(size, function, *args)`."""
    ranks = RankPool()
    yield ranks
    ranks.close()
