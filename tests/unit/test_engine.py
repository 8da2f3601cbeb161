"""The hot loop reads no value from the device; `tests/gpu` says the same of a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from lockstep.config import RunConfig
from lockstep.engine import advance
from lockstep.job import assemble
from lockstep.meter import Meter
from lockstep.options import override
from lockstep.record.base import Nothing
from lockstep.topology import Topology
from lockstep.world import World

from ..reading import NoReading

VARIANTS: list[dict[str, Any]] = [
    {"model": "resnet8", "ema": 0.9, "clip": 1.0, "accumulate": 3, "precision": "fp32"},
    {"model": "pyramidnet-20-48", "optimizer": "adamw", "precision": "bf16", "label_smoothing": 0.1},
    {"model": "mlp", "optimizer": "muon", "augment": ["crop"], "precision": "fp32"},
]


@pytest.fixture(params=["single", "ddp"])
def strategy(request: pytest.FixtureRequest) -> Iterator[tuple[str, World]]:
    """A strategy's name and a world of one rank for it: for ddp with a group, which exchanges with itself."""
    alone = request.param == "single"
    world = World.alone() if alone else World.join(Topology(), torch.device("cpu"), HashStore(), timeout_s=60)
    yield request.param, world
    world.close()


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: str(options["model"]))
def test_no_step_reads_a_value(strategy: tuple[str, World], options: dict[str, Any]) -> None:
    name, world = strategy
    job = assemble(override(RunConfig(), data="digits", batch=20, strategy=name, **options), world)
    assert (job.replica is job.model) == (name == "single"), "ddp has a group, and wraps"
    meter = Meter(job.world, Nothing(), log_every=100, total_steps=job.total_steps)
    batches = iter(job.batches(0))
    with NoReading():
        for step in range(3):
            advance(job, step, next(batches), meter)
    meter.flush(stop=False)
