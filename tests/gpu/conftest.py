"""What the tests on a GPU share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _reproducible_cublas() -> None:
    """Set what --deterministic needs before CUDA starts, as the launchers do in a rank's own process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
