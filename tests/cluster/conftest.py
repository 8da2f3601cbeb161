"""What the tests on several hosts share."""

from __future__ import annotations

import os

import pytest

from .hosts import missing


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where there can be no hosts as network namespaces; where tests have to run, fail."""
    if why := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"tests on several hosts have to run here: {why}")
        pytest.skip(why)
