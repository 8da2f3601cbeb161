"""What the tests on real clusters share: the cluster itself, and a run to compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from ..command import ROOT, command, weights
from . import slurm

STEPS = 6
RUN = ("train", "digits", "--accelerator", "cpu", "--max-steps", STEPS)
CODE = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
"""The code beside the tests, whichever is installed."""


def need(missing: Sequence[str]) -> None:
    """Skip where programs are missing; where CI has to install them, fail."""
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """A controller and the nodes n1 and n2."""
    need(slurm.missing())
    with slurm.cluster() as running:
        yield running


@pytest.fixture(scope="session")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tensors of two ranks that spawn has started, after `STEPS` steps."""
    folder = tmp_path_factory.mktemp("spawned")
    ended = command(folder, *RUN, "--devices", 2, "--output", folder / "run", **CODE)
    assert ended.code == 0, ended.err
    return weights(folder / "run")
