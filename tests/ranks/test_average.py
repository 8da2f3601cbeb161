"""Averages of weights in a loop: the formulas, over optimizer steps, on any number of ranks and across a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.errors import RequestError
from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

EMA: dict[str, Any] = {"decay": 0.8}
LATE: dict[str, Any] = {"decay": 0.8, "start": 3, "every": 2}
SWA: dict[str, Any] = {"start": 4, "every": 3}
LAW = 1e-9
Averaged = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]


def learn(world: World, folder: Path | None, options: dict[str, Any], ways: list[dict[str, Any]]) -> Averaged:
    """Return the model's state before the first and after each step, and the averages at the end of each epoch."""
    session = loops.session(world, **options | ({} if folder is None else {"output": folder, "resume": "auto"}))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(loops.images(), 20, shuffle=True))
    averages = [session.average(model, **way) for way in ways]
    states, ends = [loops.weights(model)], []
    with session:
        for _ in session.epochs(3):
            for x, y in loader:
                session.backward(functional.cross_entropy(model(x), y))
                optimizer.step()
                if session.is_last:
                    states.append(loops.weights(model))
                optimizer.zero_grad()
            for x, _ in session.evaluating(DataLoader(loops.images(), 20)):
                assert not any(average(x).requires_grad or average.training for average in averages)
            ends.append(loops.weights(*averages))
    return states, ends


def formula(states: list[dict[str, Tensor]], step: int, way: dict[str, Any]) -> dict[str, Tensor]:
    """Return the average of the weights (states[0] is initial) after a step, with the buffers of that step."""
    start, average = way.get("start", 0), states[step]
    points = states[start : step + 1 : way.get("every", 1)]
    for name in average if points else ():
        if "running" in name or "tracked" in name:
            continue
        values = [state[name] for state in points]
        total = torch.stack(values).mean(0)
        if (decay := way.get("decay")) is not None:
            total = values[0]
            for value in values[1:]:
                total = decay * total + (1 - decay) * value
        average = average | {name: total}
    return average


def gap(state: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((state[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_average_has_the_weights_of_its_steps(pool: RankPool, accumulate: int) -> None:
    ways, options = [EMA, LATE, SWA], {"accumulate": accumulate}
    whole = pool.run(1, learn, None, options, ways)[0][1]
    for ranks in (1, 2, 3):
        by_rank = pool.run(ranks, learn, None, options, ways)
        for states, ends in by_rank:
            for epoch, (end, expected) in enumerate(zip(ends, whole, strict=True), start=1):
                for number, way in enumerate(ways):
                    model = formula(states, 4 * epoch, way)
                    average = {name: end[f"{number}.{name[2:]}"] for name in model}
                    assert gap(average, model) < LAW, (ranks, epoch, way)
                assert gap(end, expected) < LAW
                assert all(torch.equal(value, by_rank[0][1][epoch - 1][name]) for name, value in end.items())


def test_a_resumed_run_continues_its_averages_with_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    options = {"checkpoint_every": 2}
    for ranks in (1, 2):
        whole = pool.run(ranks, learn, tmp_path / f"whole-{ranks}", options, [EMA, SWA])[0][1]
        for steps in (5, 9, 12):  # within the second and the third epoch
            end = pool.run(ranks, learn, tmp_path / f"parts-{ranks}", options | {"max_steps": steps}, [EMA, SWA])[0][1]
        assert all(torch.equal(value, end[-1][name]) for name, value in whole[-1].items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"decay": 1.0}, "found decay=1.0"),
        ({"decay": 0.0}, "found decay=0.0"),
        ({"start": -1}, "start=-1"),
        ({"every": 0}, "every=0"),
        ({"start": 2.5}, "start=2.5"),
        ({"model": nn.Linear(2, 2)}, "a model that session.prepare has returned"),
    ],
)
def test_an_average_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    session = loops.session(World.alone())
    model = session.prepare(nn.Linear(2, 2))
    with pytest.raises(RequestError, match=words):
        session.average(**{"model": model} | arguments)
    session.close(KeyboardInterrupt())
