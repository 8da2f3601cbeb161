"""What some tests need of the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest


def need(lacking: Sequence[str]) -> None:
    """Skip where something is missing; where CI has to install it, fail."""
    if lacking:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"not there: {', '.join(lacking)}")
