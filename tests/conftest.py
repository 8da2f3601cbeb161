"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from .pool import RankPool

# What is drawn is the same in every run, and no stall of a busy machine is a failure.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes for `pool.run(size, function, *args)`."""
    ranks = RankPool()
    yield ranks
    ranks.close()
