"""Runs whose losses and weights tests compare."""

from __future__ import annotations

import math
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep import checkpoint
from lockstep.config.options import override
from lockstep.config.registry import KINDS
from lockstep.config.schema import RunConfig
from lockstep.record.base import Recorder
from lockstep.trainer import train
from lockstep.world.world import World

from .command import losses
from .pool import RankPool

_FLOOR = 1e-3
Weights = dict[str, npt.NDArray[Any]]
Curve = tuple[dict[int, float], Weights]


class Losses(Recorder):
    """A recorder that keeps each step's loss."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def record(self, event: str, **fields: Any) -> None:
        for row in fields.get("rows", []):
            self.by_step[row["step"]] = row["loss"]


def _train(world: World, values: dict[str, Any]) -> dict[int, float]:
    torch.set_num_threads(1)
    losses = Losses()
    train(override(RunConfig(), **values), world, losses)
    return losses.by_step


def curve(pool: RankPool, folder: Path, ranks: int, **values: Any) -> Curve:
    """Return ({step: loss}, weights) of a run on `ranks` ranks, in float64 unless `values` say otherwise."""
    asked = {"precision": "fp64", "strategy": "ddp" if ranks > 1 else "single", "epochs": 1000} | values
    limit_s = 600 if values.get("compile") else 120  # a compiler takes minutes where others keep the cores busy
    collectives = values.get("collectives", "auto")
    losses = pool.run(ranks, _train, asked | {"output": folder}, timeout_s=limit_s, collectives=collectives)[0]
    return losses, {name: tensor.numpy() for name, tensor in checkpoint.load(folder).tensors.items()}


@lru_cache
def _alone(pool: RankPool, values: tuple[tuple[str, Any], ...]) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        return curve(pool, Path(folder), 1, **dict(values))


def alone(pool: RankPool, **values: Any) -> Curve:
    """Return the curve of one process; each is trained once."""
    return _alone(pool, tuple(sorted(values.items())))


def from_alone(pool: RankPool, folder: Path, ranks: int, values: dict[str, Any], **options: Any) -> float:
    """Return how far a run of `values` with these options is apart from one process without them."""
    return apart(curve(pool, folder, ranks, **values | options), alone(pool, **values))


def spread(strategy: str, replicas: int) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks, and the options, with which `strategy` has that many replicas of the model."""
    kind = KINDS[strategy]
    each = replicas if kind.drives_all else 1
    if kind.has_two_levels:
        each = 2 if replicas > 2 and replicas % 2 == 0 else 1
    ranks = replicas // each if kind.has_ranks else 1
    options = {"strategy": strategy, "devices": each if kind.drives_all else None}
    return ranks, options | ({"shard_modules": ("*",)} if kind.divides_weights else {})


def apart(ours: Curve, theirs: Curve) -> float:
    """Return the largest relative difference of losses and weights, each against its tensor's largest value.

    Tensors that mathematics makes zero hold rounding noise, which differs freely; below the floor, differences count
    as absolute ones of 1e-12.
    """
    assert ours[0].keys() == theirs[0].keys()
    assert ours[1].keys() == theirs[1].keys()
    for by_step, tensors in (ours, theirs):  # max() drops what is no number
        assert all(map(math.isfinite, by_step.values()))
        assert all(np.isfinite(held).all() for held in tensors.values())
    losses = [abs(ours[0][step] - theirs[0][step]) / abs(theirs[0][step]) for step in ours[0]]
    weights = [
        float(np.abs(ours[1][name] - held).max() / max(float(np.abs(held).max()), _FLOOR))
        for name, held in theirs[1].items()
        if held.size
    ]
    return max([*losses, *weights])


def same_bits(ours: Curve, theirs: Curve) -> bool:
    """Whether losses (of the steps that both have) and all tensors are the same bits."""
    steps = ours[0].keys() & theirs[0].keys()
    return (
        bool(steps)
        and all(ours[0][step] == theirs[0][step] for step in steps)
        and ours[1].keys() == theirs[1].keys()
        and all(held.tobytes() == theirs[1][name].tobytes() for name, held in ours[1].items())
    )


def of_run(folder: Path) -> Curve:
    """Return ({step: loss}, weights) of the run in a folder."""
    return dict(losses(folder)), {name: tensor.numpy() for name, tensor in checkpoint.load(folder).tensors.items()}
