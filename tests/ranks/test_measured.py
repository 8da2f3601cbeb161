"""Images a second and the time waited for data, as a run tells them, are those that were measured by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lockstep.config import RunConfig
from lockstep.options import override
from lockstep.runs import run
from lockstep.world import World

from ..pool import RankPool

SAMPLES = 320
READ_S: list[tuple[float, float]] = []
"""When each training sample was asked for, and when it came."""


class _Set(Dataset[tuple[Tensor, int]]):
    """Samples of which each comes after `sample_s` seconds."""

    classes = 4

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        begun_s = time.perf_counter()
        time.sleep(self.sample_s)
        READ_S.append((begun_s, time.perf_counter()))
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


class Plain(nn.Linear):
    """A net whose training step takes `step_s` seconds and more."""

    step_s = 0.0

    def __init__(self, classes: int) -> None:
        super().__init__(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.step_s if self.training else 0)
        return super().forward(x)


class Slow(Plain):
    """A net that takes as long as the slow data."""

    step_s = 0.05


HELD_OUT = TensorDataset(torch.zeros(8, 8), torch.zeros(8, dtype=torch.int64))


def slow() -> tuple[_Set, TensorDataset]:
    return _Set(0.005), HELD_OUT


def quick() -> tuple[_Set, TensorDataset]:
    return _Set(0), HELD_OUT


def _run(world: World, folder: Path, data: str, model: str) -> tuple[float, float, dict[str, Any]]:
    """Return how long training took and how much of it data were waited for, and what the run tells."""
    torch.set_num_threads(1)
    READ_S.clear()
    asked = {"strategy": "ddp" if world.size > 1 else "single", "batch": 16, "epochs": 1, "workers": 0}
    own = {"data": f"{__name__}:{data}", "model": f"{__name__}:{model}"}
    told = run(override(RunConfig(), accelerator="cpu", output=folder, **asked, **own), world).as_json()
    read = READ_S[-SAMPLES // world.size :]  # a rehearsal has read some before
    return read[-1][1] - read[0][0], sum(came_s - begun_s for begun_s, came_s in read), told


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_told_is_what_was_measured(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    for data, model in (("slow", "Plain"), ("quick", "Slow")):
        took_s, waited_s, told = pool.run(ranks, _run, tmp_path / data, data, model)[0]
        assert 0.6 < told["images_per_s"] * took_s / SAMPLES < 1.5
        assert told["data_wait_s"] < (1.2 if data == "slow" else 0.5) * took_s
        assert data == "quick" or told["data_wait_s"] > 0.6 * waited_s
