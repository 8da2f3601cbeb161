"""Draws of user code are those of one device: losses and gradients on 1, 2 and 3 ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from lockstep.errors import RequestError
from lockstep.training.draw_watch import DrawWatch
from lockstep.training.draws import GlobalDraws
from lockstep.world.world import World

from ..drawing import CASES, TOKENS, WIDTH
from ..pool import RankPool

LAW = 1e-9
Trained = tuple[list[float], list[Tensor]]


X = torch.randn(64, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Y = torch.arange(64) % 3


def model_of(name: str) -> nn.Module:
    """Return the same net on every rank, and leave each rank a stream of its own."""
    torch.manual_seed(1)
    model = CASES[name].model().double()
    torch.seed()
    return model


def train(world: World, name: str, batches: list[list[int]]) -> Trained:
    """Return losses and gradients. Each batch gives the ranks' sizes; one rank has all samples."""
    draws, losses, model = GlobalDraws(world, seed=5), [], model_of(name)
    before = torch.get_rng_state()
    for number, sizes in enumerate(batches):
        start, size, total = share_of(world, sizes)
        draws.begin(start, size, total, number)
        try:
            loss = loss_of(name, model, start, size, total)
            loss.backward()
            draws.check()
        finally:
            draws.end()
        losses.append(world.sum(loss.detach()).item())
    assert torch.equal(torch.get_rng_state(), before), "the rank's own stream"
    return losses, gradients(world, model)


def train_later(world: World, name: str, batches: list[list[int]]) -> Trained:
    """As `train`, with all forward passes before the backward passes."""
    draws, losses, model = GlobalDraws(world, seed=5), [], model_of(name)
    try:
        for number, sizes in enumerate(batches):
            share = share_of(world, sizes)
            draws.begin(*share, number)
            losses.append((loss_of(name, model, *share), share))
        for number, (loss, share) in enumerate(losses):
            draws.begin(*share, number, 1)
            loss.backward()
    finally:
        draws.end()
    return [world.sum(loss.detach()).item() for loss, _ in losses], gradients(world, model)


def share_of(world: World, sizes: list[int]) -> tuple[int, int, int]:
    sizes = [sum(sizes)] if world.size == 1 else sizes
    return sum(sizes[: world.rank]), sizes[world.rank], sum(sizes)


def loss_of(name: str, model: nn.Module, start: int, size: int, total: int) -> Tensor:
    rows = slice(start, start + size) if size else slice(0, 1)
    return CASES[name].loss(model, X[rows], Y[rows]) * (size / total)


def gradients(world: World, model: nn.Module) -> list[Tensor]:
    return [world.sum(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def gap(one: Trained, other: Trained) -> float:
    pairs = [*zip(map(torch.tensor, one[0]), map(torch.tensor, other[0]), strict=True)]
    pairs += zip(one[1], other[1], strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


TWO, THREE = [[4, 3], [3, 2], [1, 0]], [[3, 3, 2], [2, 1, 1], [1, 1, 0]]
LONG = ("reentrant checkpoint", "sequence first", "flattened")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def test_ranks_draw_as_one_device(pool: RankPool, name: str) -> None:
    for batches in (TWO, THREE):
        alone = train(World.alone(), name, batches)
        assert min(abs(loss) for loss in alone[0]) > 1e-3
        for trained in pool.run(len(batches[0]), train, name, batches):
            assert gap(alone, trained) < LAW, batches


@pytest.mark.parametrize("name", ["recurrent", "multi-head", "attention", "transformer"])
def test_attention_and_recurrent_nets_have_their_samples_in_one_place(pool: RankPool, name: str) -> None:
    batches = [[TOKENS, TOKENS], [1, 1]]
    assert gap(train(World.alone(), name, batches), pool.run(2, train, name, batches)[0]) < LAW


@pytest.mark.parametrize("name", ["mixup", "checkpoint", "reentrant checkpoint"])
def test_backward_passes_may_come_later(pool: RankPool, name: str) -> None:
    expected = train(World.alone(), name, TWO)
    assert gap(expected, train_later(World.alone(), name, TWO)) < LAW
    assert gap(expected, pool.run(2, train_later, name, TWO)[0]) < LAW


def differing(world: World, how: str) -> str:
    """Draw other numbers on rank 1, or mix samples of other shapes; return the refusal."""
    draws = GlobalDraws(world, seed=5)
    draws.begin(2 * world.rank, 2, 4, 0)
    try:
        draw_differently(world.rank, how)
        draws.check()
    except RequestError as error:
        return str(error)
    finally:
        draws.end()
    return ""


def draw_differently(rank: int, how: str) -> None:
    if how == "shapes":
        torch.ones(2, 3 + rank)[torch.randperm(2)]
    elif how == "lengths":
        functional.dropout(torch.ones(2, 3 + rank), 0.5)
    elif how == "generator":
        torch.randn(2, generator=torch.Generator().manual_seed(rank))
    elif how == "one rank" and rank:
        torch.rand(())
    elif how == "Python":
        [random.random() for _ in range(rank)]


@pytest.mark.parametrize("how", ["shapes", "lengths", "generator", "one rank", "Python"])
def test_ranks_that_draw_other_numbers_are_named(pool: RankPool, how: str) -> None:
    sentences = set(pool.run(2, differing, how))
    (sentence,) = sentences
    assert ("their shapes differ" if how == "shapes" else "rank 1 drew other random numbers than rank 0") in sentence


def watched(world: World) -> str:
    watch = DrawWatch(world)
    watch.begin()
    torch.rand(2)
    torch.rand(2, generator=torch.Generator().manual_seed(world.rank))
    return watch.end()


def test_a_watch_ends_alike_on_all_ranks(pool: RankPool) -> None:
    (sentence,) = set(pool.run(2, watched))
    assert "different random numbers on each rank" in sentence
