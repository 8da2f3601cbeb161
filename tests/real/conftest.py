"""What the tests on several hosts and on real clusters share: the hosts, the cluster, a run to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..command import CODE as PATHS
from ..command import command, weights
from ..needs import need
from . import slurm
from .hosts import missing

STEPS = 6
RUN = ("train", "digits", "--accelerator", "cpu", "--max-steps", STEPS)
CODE = {"PYTHONPATH": PATHS}
"""The code beside the tests, whichever is installed."""


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Network namespaces can be made here."""
    need([why] if (why := missing()) else [])


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
