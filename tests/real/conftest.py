"""What the tests on real clusters share: a short run, and what two ranks of one host make of it."""

from __future__ import annotations

import pytest

from ..command import CODE as PATHS
from ..command import command, weights

STEPS = 6
RUN = ("train", "digits", "--accelerator", "cpu", "--max-steps", STEPS)
CODE = {"PYTHONPATH": PATHS}
"""The code beside the tests, whichever is installed."""


@pytest.fixture(scope="session")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tensors of two ranks that spawn has started, after `STEPS` steps."""
    folder = tmp_path_factory.mktemp("spawned")
    ended = command(folder, *RUN, "--devices", 2, "--output", folder / "run")
    assert ended.code == 0, ended.err
    return weights(folder / "run")
