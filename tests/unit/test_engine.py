"""The loop is the one that a person would write, saves where it is stopped, and reads no value from the device."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint.state import State
from lockstep.config.options import override
from lockstep.config.schema import RunConfig
from lockstep.data.order import Order
from lockstep.errors import Stopped
from lockstep.jobs.job import assemble
from lockstep.record.base import Nothing
from lockstep.runs.meter import Meter
from lockstep.trainer import train
from lockstep.world.world import World

from ..curves import Losses
from ..reading import NoReading
from ..stepping import steps

VARIANTS: list[dict[str, Any]] = [
    {"model": "resnet8", "ema": 0.9, "clip": 1.0, "accumulate": 3, "precision": "fp32"},
    {"model": "pyramidnet-20-12", "optimizer": "adamw", "precision": "bf16", "label_smoothing": 0.1},
    {"model": "mlp", "optimizer": "muon", "augment": ["crop"], "precision": "fp32"},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: str(options["model"]))
@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_no_step_reads_a_value(strategy: str, options: dict[str, Any]) -> None:
    devices = None if strategy == "single" else 2
    with contextlib.closing(World.alone()) as world:
        options = {"data": "digits", "batch": 20, "strategy": strategy, "devices": devices} | options
        job = assemble(override(RunConfig(), **options), world)
        with contextlib.closing(steps(job)) as each, pytest.MonkeyPatch.context() as patch:
            for _ in range(2):  # the findings of the first step are read once
                next(each)
            patch.setattr(Meter, "due", lambda meter, stop: False)
            with NoReading():
                for _ in range(3):
                    next(each)


def test_one_process_trains_as_a_loop_by_hand_does() -> None:
    """What a batch is, how many an epoch has, and by what each is divided, in torch alone; the last one is a sample."""
    values = {"model": "mlp", "data": "fake", "samples": 61, "image_size": 8, "batch": 20, "epochs": 2}
    config = override(RunConfig(), **values, optimizer="sgd", lr=0.05, nesterov=True, precision="fp64")
    found, losses = Losses(), []
    train(config, World.alone(), found)
    job = assemble(config, World.alone())
    asked = config.optim
    sgd = torch.optim.SGD(job.model.parameters(), 0.05, asked.momentum, weight_decay=asked.weight_decay, nesterov=True)
    for epoch in range(2):
        order = Order(61, seed=0, epoch=epoch).indices(0, 61)
        for x, y, _ in job.data.train.stream(np.split(order, [20, 40, 60]), epoch=epoch):
            loss = torch.nn.functional.cross_entropy(job.model(x), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    assert found.by_step == pytest.approx(dict(enumerate(losses, 1)), rel=1e-12)


def test_a_run_that_is_stopped_saves_the_step_it_has_come_to(tmp_path: Path) -> None:
    values = {"model": "tests.models:Interrupting", "data": "digits", "batch": 32, "output": tmp_path}  # at its step 23
    with pytest.raises(Stopped, match="at step 23 of 45 and saved"):
        train(override(RunConfig(), epochs=1, **values), World.alone(), Nothing())
    assert checkpoint.load(tmp_path).meta["step"] == 23


def test_the_loss_and_its_scale_are_one_matter_in_half_precision(tmp_path: Path) -> None:
    config = override(RunConfig(), data="digits", model="mlp", precision="fp16", max_steps=3, output=tmp_path)
    train(config, World.alone(), Nothing())
    assert checkpoint.load(tmp_path).meta["scaler"]["_growth_tracker"] == 3


def test_weights_that_nobody_has_scored_are_scored_where_no_step_is_left(tmp_path: Path) -> None:
    config = override(RunConfig(), data="digits", model="mlp", epochs=1, output=tmp_path / "run")
    first = train(config, World.alone(), Nothing())
    saved = checkpoint.load(tmp_path / "run")
    unscored = State(saved.tensors, saved.meta | {"scores": None, "evaluated": 0, "best_top1": None})
    again = train(override(config, output=tmp_path / "again"), World.alone(), Nothing(), state=unscored)
    assert (again.top1, again.steps) == (first.top1, first.steps)
