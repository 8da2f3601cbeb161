"""What the tests on several hosts and on real clusters share: hosts, a cluster, data, and a run to compare with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from ..command import CODE as PATHS
from ..command import command, weights
from ..needs import need
from . import slurm
from .hosts import missing

STEPS = 6
RUN = ("train", "digits", "--accelerator", "cpu", "--max-steps", STEPS)
PACED = (
    *("train", "--data", "tests.real.conftest:paced", "--model", "mlp", "--strategy", "ddp", "--accelerator", "cpu"),
    *("--epochs", 40, "--workers", 0, "--checkpoint-every", 30, "--batch", 16, "--log-every", 5, "--precision", "fp64"),
    *("--output", "run"),
)
"""A thousand steps, which take a minute until the current folder has a file `hurry`."""
CODE = {"PYTHONPATH": PATHS}
"""The code beside the tests, whichever is installed."""


class _Paced(Dataset[tuple[torch.Tensor, int]]):
    classes = 4

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not Path("hurry").exists():
            time.sleep(0.006)
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


def paced() -> tuple[_Paced, _Paced]:
    """Return data that keep a run going until it is told to hurry."""
    return _Paced(400), _Paced(40)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a paced run of two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "hurry").touch()
    ended = command(folder, *PACED, "--devices", 2, **CODE)
    assert ended.code == 0, ended.err
    return folder / "run"


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
