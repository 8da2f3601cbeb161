"""What all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from .pool import RankPool

# Whoever starts the tests in the background, or under nohup, has them and the commands they start ignore these.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# What is drawn is the same in every run, and no stall of a busy machine is a failure.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Rank processes for `pool.run(size, function, *args)`."""
    ranks = RankPool()
    yield ranks
    ranks.close()
