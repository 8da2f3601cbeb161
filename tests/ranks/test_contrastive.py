"""Contrastive losses over the rows of all ranks have the gradients of one process in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.world.world import World

from .. import loops
from ..pool import RankPool

BATCH, SAMPLES, LAW = 7, 16, 1e-9  # the last batch has two samples: on three ranks, a share is empty
DATA = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


class Pairs(nn.Module):
    """Two encoders, and the temperature of their similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(math.log(5)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.left(x[:, :4]), dim=1), functional.normalize(self.right(x[:, 4:]), dim=1)


def symmetric(model: Pairs, left: Tensor, right: Tensor) -> Tensor:
    """Return the loss of CLIP: each row of one side picks its partner among all rows of the other."""
    logits, target = model.scale.exp() * left @ right.T, torch.arange(len(left))
    return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)) / 2


def two_views(model: Pairs, left: Tensor, right: Tensor) -> Tensor:
    """Return the loss of SimCLR: each view picks its partner among all other views of both sides."""
    views, count = torch.cat([left, right]), len(left)
    logits = (model.scale.exp() * views @ views.T).masked_fill(torch.eye(2 * count, dtype=torch.bool), -math.inf)
    return functional.cross_entropy(logits, torch.arange(2 * count).roll(count))


LOSSES = {"symmetric": symmetric, "two views": two_views}


def contrast(world: World, how: str, accumulate: int) -> list[Tensor]:
    """Return the gradients of each step, of rows against all rows on every rank, or of this rank's rows against all."""
    session = loops.session(world, accumulate=accumulate)
    torch.manual_seed(0)
    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(DATA), BATCH))
    gradients: list[Tensor] = []
    with session:
        for _ in session.epochs(2):
            for (x,) in loader:
                left, right = model(x)
                all_left, all_right = map(session.gather, (left, right))
                if how == "own rows":
                    count = session.samples
                    start = sum(session.gather(count)[: session.rank])
                    target, scale = torch.arange(start, start + count), model.scale.exp()
                    loss = functional.cross_entropy(scale * left[:count] @ all_right.T, target) / 2
                    loss = loss + functional.cross_entropy(scale * right[:count] @ all_left.T, target) / 2
                else:
                    loss = LOSSES[how](model, all_left, all_right)
                session.backward(loss)
                if session.is_last:
                    gradients.append(flat(model))
                optimizer.step()
                optimizer.zero_grad()
    return gradients


def plain(how: str, accumulate: int) -> list[Tensor]:
    """Return the gradients of plain torch. A batch's loss is the mean over its samples of its micro-batches' losses."""
    torch.manual_seed(0)
    model, gradients = Pairs().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x in [*DATA.split(BATCH)] * 2:
        for part in x.tensor_split(math.ceil(len(x) * accumulate / BATCH)):
            loss: Any = LOSSES.get(how, symmetric)(model, *model(part))
            (loss * len(part) / len(x)).backward()
        gradients.append(flat(model))
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", [*LOSSES, "own rows"])
def test_gathered_rows_have_the_gradients_of_one_process(pool: RankPool, how: str, accumulate: int) -> None:
    expected = torch.stack(plain(how, accumulate))
    for ranks in (1, 2, 3):
        for gradients in pool.run(ranks, contrast, how, accumulate):
            assert (torch.stack(gradients) - expected).norm() < LAW * expected.norm(), ranks


def warned(world: World, how: str) -> str:
    """Return the warnings of a loop whose ranks give the sum over all rows, or over their own."""
    told: list[str] = []
    session = loops.session(world)
    session.loop.warn = told.append  # type: ignore[method-assign, assignment]
    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(TensorDataset(DATA), BATCH))
    with session:
        for _ in session.epochs(1):
            for (x,) in loader:
                left, right = model(x)
                left = left if how == "own rows" else session.gather(left)
                loss = (left @ session.gather(right).T).logsumexp(1).sum()
                session.backward(
                    loss / len(left) if how == "mean" else loss, reduction="mean" if how == "mean" else "sum"
                )
                optimizer.step()
                optimizer.zero_grad()
    return " ".join(told)


@pytest.mark.parametrize(
    ("how", "ranks", "warns"), [("all", 2, True), ("all", 1, False), ("mean", 2, False), ("own rows", 2, False)]
)
def test_the_same_sum_of_every_rank_is_told(pool: RankPool, how: str, ranks: int, warns: bool) -> None:
    assert ("gradients are 2 times too large" in pool.run(ranks, warned, how)[0]) == warns
