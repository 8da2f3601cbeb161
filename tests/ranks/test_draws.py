"""Draws of user code are those of one device: losses and gradients on 1, 2 and 3 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.training.draws import GlobalDraws
from lockstep.world.world import World

from ..drawing import CASES, TOKENS, WIDTH
from ..pool import RankPool

LAW = 1e-9
Trained = tuple[list[float], list[Tensor]]


def train(world: World, name: str, batches: list[list[int]]) -> Trained:
    """Return losses and gradients of global batches. Each gives the ranks' sizes; rank 0 alone has all."""
    torch.manual_seed(1 + world.rank)
    draws, losses = GlobalDraws(world, seed=5), []
    before = torch.get_rng_state()
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        case = CASES[name]
        model = case.model()
        torch.set_rng_state(before)
        x = torch.randn(64, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
        y = torch.arange(64) % 3
        for number, sizes in enumerate(batches):
            sizes = [sum(sizes)] if world.size == 1 else sizes
            start, size, total = sum(sizes[: world.rank]), sizes[world.rank], sum(sizes)
            rows = slice(start, start + size) if size else slice(0, 1)
            draws.begin(start, size, total, number)
            loss = case.loss(model, x[rows], y[rows]) * (size / total)
            loss.backward()
            draws.check()
            draws.end()
            losses.append(world.sum(loss.detach()).item())
        assert torch.equal(torch.get_rng_state(), before), "the rank's own stream"
        return losses, [world.sum(p.grad) for p in model.parameters() if p.grad is not None]
    finally:
        torch.set_default_dtype(torch.float32)


def gap(one: Trained, other: Trained) -> float:
    pairs: list[tuple[Any, Any]] = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(*map(list, (one[0], other[0])), strict=True)]
    pairs += zip(one[1], other[1], strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_ranks_draw_as_one_device(pool: RankPool, name: str) -> None:
    for batches in ([[6, 6], [6, 6]], [[4, 3], [3, 2], [1, 0]]), ([[4, 4, 4]], [[3, 3, 2], [2, 1, 1], [1, 1, 0]]):
        for sizes in batches:
            alone = train(World.alone(), name, sizes)
            for trained in pool.run(len(sizes[0]), train, name, sizes):
                assert gap(alone, trained) < LAW, sizes
