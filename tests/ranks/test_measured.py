"""Images a second and the time waited for data, as a run tells them, are those that were measured by hand."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lockstep.cli.train import entry
from lockstep.compare import forecast, measured, records, traffic
from lockstep.compare.measured import COMPARED, FILE, measure, measure_share
from lockstep.config.options import override, recipe
from lockstep.config.schema import RunConfig
from lockstep.record.console import Notices
from lockstep.runs.opened import open_run
from lockstep.sessions.hooks import Hooks
from lockstep.sessions.session import Session
from lockstep.trainer import run
from lockstep.world.world import World

from .. import own_data
from ..pool import RankPool

SAMPLES = 320
READ_S: list[tuple[float, float]] = []
"""When each training sample was asked for, and when it came."""


class Timed(own_data._Samples):
    """Samples of which each takes 5 ms."""

    def __getitem__(self, index: int) -> own_data.Pair:
        begun_s = time.perf_counter()
        time.sleep(0.005)
        READ_S.append((begun_s, time.perf_counter()))
        return super().__getitem__(index)


def timed() -> own_data.Splits:
    return Timed(SAMPLES), own_data._Samples(8)


class Slow(nn.Linear):
    """A net whose training step takes 50 ms and more."""

    def __init__(self, classes: int) -> None:
        super().__init__(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05 if self.training else 0)
        return super().forward(x)


@contextlib.contextmanager
def _briefly() -> Iterator[None]:
    """Measure for a fraction of the seconds that make numbers steady."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "_WARM_S", 0.1)
        patch.setattr(measured, "_TIMED_S", 0.4)
        yield


def _run(world: World, folder: Path) -> tuple[float, float, dict[str, Any]]:
    """Return how long training took and how much of it data were waited for, and what the run tells."""
    torch.set_num_threads(1)
    READ_S.clear()
    asked = {"strategy": "ddp", "batch": 16, "epochs": 1, "workers": 0, "accelerator": "cpu", "output": folder}
    own = {"data": f"{__name__}:timed", "model": f"{__name__}:Slow"}
    told = run(override(RunConfig(), **asked | own), world).as_json()
    read = READ_S[-SAMPLES // world.size :]  # a rehearsal has read some before
    return read[-1][1] - read[0][0], sum(came_s - begun_s for begun_s, came_s in read), told


def test_what_is_told_is_what_was_measured(pool: RankPool, tmp_path: Path) -> None:
    took_s, waited_s, told = pool.run(2, _run, tmp_path)[0]
    assert 0.6 < told["images_per_s"] * took_s / SAMPLES < 1.5
    assert 0.6 * waited_s < told["data_wait_s"] < 1.4 * waited_s < took_s, "the steps take as long as the data"


def _watched(world: World, folder: Path, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return what is measured of digits, on all ranks of the world, or of the first of so many without the others."""
    torch.set_num_threads(1)
    # Without end, as the command has it: a fast machine comes to the end of an epoch that is the last, and evaluates.
    endless = {"eval_every": 10**9, "epochs": 10**6}
    config = override(recipe("digits"), strategy="ddp", accelerator="cpu", output=folder, **endless, **options)
    with _briefly():
        measure_share(entry, ranks, config, world) if ranks > world.size else measure(entry, 4, config, world)
    world.barrier()  # rank 0 writes
    found: dict[str, Any] = json.loads((folder / FILE).read_text())
    return found


def test_a_lone_rank_meets_the_exchanges_that_ranks_make(pool: RankPool, tmp_path: Path) -> None:
    not_yet = {"exchange": "powersgd", "powersgd_start": 10**6}  # until it begins, gradients travel as under ddp
    together = pool.run(2, _watched, tmp_path / "together", 2, not_yet)[0]
    alone = pool.run(1, _watched, tmp_path / "alone", 2, {})[0]
    share = forecast.share(2, 64, [alone])
    told = together["bytes_a_step"] - traffic.bytes_a_step(share.profile, 2)
    assert told == 0
    points = share.profile.points
    assert sum(point.kind == traffic.GATHER for point in points) == 2 * 9, "of each BatchNorm, both ways"
    runs = [(kind, [*run]) for kind, run in itertools.groupby(points, lambda point: point.kind)]
    assert [kind for kind, _ in runs] == 10 * [traffic.GATHER, traffic.GRADIENT], "while the backward pass goes on"
    convolutions = [run[-1].number for kind, run in runs if kind == traffic.GRADIENT]
    assert convolutions == [*range(27, -1, -3)], "in its order, the last layer first"
    assert share.profile.step_s < 2 * sum(together["step_s"]) / len(together["step_s"])


def _without_loader(config: RunConfig, world: World, hooks: Hooks) -> None:
    """Train by a loop that makes its own batches, of five steps, beyond which its schedule has no learning rate."""
    run = open_run(config, world, keys=("seed",), console=Notices())
    with Session(config, world, run, hooks=hooks) as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        model, optimizer, schedule = session.prepare(model, optimizer, schedule)
        for _ in session.epochs(1):
            for _ in range(5):
                session.backward(model(torch.ones(8, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()


def _measured_without_loader(world: World, folder: Path) -> dict[str, Any]:
    with _briefly():
        measure(_without_loader, 6, override(RunConfig(), accelerator="cpu", output=folder), world)
    found: dict[str, Any] = json.loads((folder / FILE).read_text())
    return found


def test_a_loop_that_makes_its_own_batches_is_measured_for_longer_than_it_lasts(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(1, _measured_without_loader, tmp_path)[0]
    assert len(found["step_s"]) == 6
    assert records.record(tmp_path).plan == {}, "nothing tells samples: its steps are counted"


class Dropping(nn.Module):
    """Attention and layers with dropout, as of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(functional.dropout(self.encoder(x).mean(1), 0.2, self.training))
        return scores


def _mixing(config: RunConfig, world: World, hooks: Hooks) -> None:
    """Train a net with dropout on samples mixed by MixUp."""
    run = open_run(config, world, keys=("seed",), console=Notices())
    with Session(config, world, run, hooks=hooks) as session:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(68, 6, 16, generator=generator), torch.arange(68) % 4)
        model = Dropping()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(data, batch_size=17, shuffle=True))
        for _ in session.epochs(1):
            for x, y in loader:
                share, perm = torch.rand(()), torch.randperm(len(x))
                scores = model(share * x + (1 - share) * x[perm])
                loss = share * functional.cross_entropy(scores, y)
                session.backward(loss + (1 - share) * functional.cross_entropy(scores, y[perm]))
                optimizer.step()
                optimizer.zero_grad()
                DRAWN.append(float(torch.rand(())))


DRAWN: list[float] = []
"""A number that is drawn after each step."""


def _measured_mixing(world: World, folder: Path, draws: str) -> tuple[dict[str, Any], list[float]]:
    DRAWN.clear()
    config = override(RunConfig(), accelerator="cpu", output=folder, draws=draws)
    with _briefly():
        measure(_mixing, 4, config, world)
    world.barrier()
    return json.loads((folder / FILE).read_text()), [*DRAWN]


@pytest.mark.parametrize("draws", ["rank", "global"])
def test_compared_steps_have_the_draws_of_one_device_and_timed_ones_the_jobs_own(
    draws: str, pool: RankPool, tmp_path: Path
) -> None:
    losses, drawn = {}, {}
    for ranks in (1, 2):
        found = pool.run(ranks, _measured_mixing, folder := tmp_path / str(ranks), draws)
        told, _ = found[0]
        assert f"{__name__.rpartition('.')[2]}.py:" in told["first_draw"]
        losses[ranks] = [loss for _, loss in sorted(records.record(folder).losses.items())]
        drawn[ranks] = [numbers for _, numbers in found]
    assert losses[2][:COMPARED] == pytest.approx(losses[1][:COMPARED], rel=1e-5)
    assert (losses[2][COMPARED] == pytest.approx(losses[1][COMPARED], rel=1e-3)) == (draws == "global")
    first, second = drawn[2]
    assert first[:COMPARED] == second[:COMPARED] == drawn[1][0][:COMPARED]
    assert (first[COMPARED:] == second[COMPARED:]) == (draws == "global")
