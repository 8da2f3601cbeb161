"""Random generators: saved and continued exactly, one for each device that a strategy drives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.world.random_state import Generators, load_generators, save_generators, seed_all
from lockstep.world.world import World

ALONE = World.alone()
CPU = (torch.device("cpu"),)
GPUS = tuple(torch.device("cuda", index) for index in (2, 0))


def _draw() -> list[float]:
    """Draw from each library's generator; an odd number of Gaussians, of which two are made at a time."""
    return [*torch.rand(4).tolist(), random.random(), random.gauss(), np.random.rand(), np.random.randn()]


def test_generators_continue_where_they_were() -> None:
    seed_all(3, 0)
    _draw()
    saved = json.loads(json.dumps(save_generators(ALONE, CPU)))
    expected = _draw()
    seed_all(4, 0)
    load_generators(ALONE, saved, 5, devices=CPU)
    assert _draw() == expected


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand, np.random.randn])
def test_a_single_draw_is_seen(draw: Callable[[], Any]) -> None:
    for _ in range(700):  # past the end of a Mersenne twister's 624 words
        before = Generators.now(())
        assert before.is_now()
        draw()
        draw()  # the second Gaussian of a pair is drawn from nothing
        assert not before.is_now()


def test_every_gpu_that_is_driven_continues_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {index: torch.Generator().manual_seed(index).get_state() for index in range(3)}  # none need be here
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: gpus[gpu.index])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: gpus.update({gpu.index: state}))
    saved, before = save_generators(ALONE, GPUS), gpus.copy()
    gpus |= {index: torch.Generator().manual_seed(10 + index).get_state() for index in gpus}
    between = gpus.copy()
    load_generators(ALONE, saved, 5, devices=GPUS)
    for index, expected in ((0, before), (1, between), (2, before)):
        assert torch.equal(gpus[index], expected[index])
