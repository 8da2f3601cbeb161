"""Images a second and the time waited for data, as a run tells them, are those that were measured by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import RunConfig
from lockstep.options import override
from lockstep.runs import run
from lockstep.world import World

from ..pool import RankPool

SAMPLES, BATCH = 320, 16
READ_S: list[tuple[float, float]] = []
"""When each training sample was asked for, and when it came."""


class _Set(Dataset[tuple[Tensor, int]]):
    """Samples of which each comes after `sample_s` seconds."""

    classes = 4

    def __init__(self, samples: int, sample_s: float | None) -> None:
        self.samples, self.sample_s = samples, sample_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.sample_s is not None:
            begun_s = time.perf_counter()
            time.sleep(self.sample_s)
            READ_S.append((begun_s, time.perf_counter()))
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


def slow() -> tuple[_Set, _Set]:
    """Return data that a run waits for."""
    return _Set(SAMPLES, 0.005), _Set(8, None)


def quick() -> tuple[_Set, _Set]:
    """Return data that nobody waits for."""
    return _Set(SAMPLES, 0), _Set(8, None)


class Plain(nn.Module):
    """A net whose training step takes `step_s` seconds and more."""

    step_s = 0.0

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.step_s if self.training else 0)
        scores: Tensor = self.layer(x)
        return scores


class Slow(Plain):
    """A net that takes as long as the slow data."""

    step_s = 0.05


def _run(world: World, folder: Path, values: dict[str, str]) -> tuple[float, float, dict[str, Any]]:
    """Return how long training took and how much of it data were waited for, and what the run tells."""
    torch.set_num_threads(1)
    READ_S.clear()
    named = {name: f"{__name__}:{value}" for name, value in values.items()}
    asked = {"strategy": "ddp" if world.size > 1 else "single", "batch": BATCH, "epochs": 1, "workers": 0}
    config = override(RunConfig(), accelerator="cpu", output=folder, **asked, **named)
    told = run(config, world).as_json()
    own = READ_S[-SAMPLES // world.size :]  # a rehearsal has read some before
    return own[-1][1] - own[0][0], sum(came_s - begun_s for begun_s, came_s in own), told


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_told_is_what_was_measured(pool: RankPool, tmp_path: Path, ranks: int) -> None:
    for data, model in (("slow", "Plain"), ("quick", "Slow")):
        took_s, waited_s, told = pool.run(ranks, _run, tmp_path / data, {"data": data, "model": model})[0]
        assert 0.6 < told["images_per_s"] * took_s / SAMPLES < 1.5
        assert told["data_wait_s"] < 1.2 * took_s
        if data == "slow":
            assert told["data_wait_s"] > 0.6 * waited_s
        else:
            assert told["data_wait_s"] < 0.5 * took_s
