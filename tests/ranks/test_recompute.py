"""Activations that are recomputed in the backward pass: the same bits as activations that are kept."""

from __future__ import annotations

import random
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
from ..curves import curve, same_bits
from ..pool import RankPool

Learned = tuple[list[float], dict[str, Tensor], int]


class Block(nn.Module):
    """A residual block with batch statistics, which draws by torch and by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> Any:
        self.calls += torch.is_grad_enabled()
        noise = 0.1 * torch.randn_like(x[:, :1, :1, :1])
        return x + scale * (1 + 0.5 * (random.random() < 0.5)) * self.layers(x + noise)


class Net(nn.Module):
    """Two blocks between a convolution and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv2d(3, 8, 3), nn.ModuleList([Block(), Block()])
        self.head, self.scale = nn.Linear(128, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(x.flatten(1))


class Joined(Net):
    """The net over two views of each sample, joined along the batch."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.cat([x, x.flip(3)])).unflatten(0, (2, -1)).sum(0)


def learn(world: World, options: dict[str, Any], ahead: int = 1, kind: type[Net] = Net) -> Learned:
    """Return losses, the state, and the forward passes of a block. The loop computes `ahead` losses before a step.

    The fourth batch is one sample, so that shares are empty.
    """
    session = loops.session(world, **options)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(loops.images(), 20, shuffle=True))
    losses: list[float] = []
    with session:
        for _ in session.epochs(2):
            waiting = []
            for number, (x, y) in enumerate(loader, start=1):
                waiting.append(functional.cross_entropy(model(x), y))
                if number % ahead:
                    continue
                for loss in waiting:
                    session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses += [loss.item() for loss in waiting]
                waiting.clear()
    calls: Any = model.blocks[0].calls
    return losses, model.state_dict(), calls


def slowly(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "options", "ahead", "kind"),
    [
        (1, {"draws": "rank"}, 1, Net),
        slowly(3, {"draws": "rank"}, 1, Net),
        slowly(2, {"draws": "global"}, 1, Net),
        (3, {"draws": "global", "accumulate": 2}, 1, Net),
        (2, {"draws": "rank", "batchnorm": "local"}, 1, Net),
        slowly(1, {"draws": "global"}, 1, Net),
        (2, {"draws": "global"}, 2, Net),
        slowly(1, {"draws": "global"}, 2, Net),
        (2, {"draws": "rank", "precision": "bf16"}, 1, Net),
        (2, {"draws": "global"}, 2, Joined),
    ],
)
def test_recomputed_activations_have_the_bits_of_kept_ones(
    pool: RankPool, ranks: int, options: dict[str, Any], ahead: int, kind: type[Net]
) -> None:
    kept = pool.run(ranks, learn, options, ahead, kind)
    recomputed = pool.run(ranks, learn, options | {"checkpoint_activations": ["Blo*"]}, ahead, kind)
    for (losses, state, calls), (same_losses, same_state, twice) in zip(kept, recomputed, strict=True):
        assert losses == same_losses
        assert [*state] == [*same_state]
        assert all(torch.equal(tensor, same_state[name]) for name, tensor in state.items())
        assert twice == 2 * calls


def test_recomputed_activations_change_no_recipe(pool: RankPool, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": "resnet8", "data": "fake", "image_size": 8, "batch": 50, "samples": 337}
    values |= {"max_steps": 6, "ema": 0.9, "checkpoint_every": 4}
    kept = curve(pool, tmp_path / "kept", 2, **values)
    options = values | {"checkpoint_activations": ["*Block"]}
    curve(pool, tmp_path / "recomputed", 2, **options | {"max_steps": 3})
    assert same_bits(kept, curve(pool, tmp_path / "recomputed", 2, **options, resume="auto"))


class Counting(nn.Module):
    """A layer whose forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(108, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.get_buffer("count").add_(1)
        return self.linear(x.flatten(1))


def refused(world: World, make: str, pattern: str) -> str:
    """Return the sentence for a model or pattern that cannot be honoured."""
    session = loops.session(world, checkpoint_activations=[pattern])
    model: Any = Counting() if make == "counting" else Net()
    if make == "compiled":
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with session:
            model, optimizer, loader = session.prepare(model, optimizer, DataLoader(loops.images(), 20))
            for _ in session.epochs(1):
                for x, y in loader:
                    session.backward(functional.cross_entropy(model(x), y))
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "pattern", "words"),
    [
        ("net", "Blok", "Unknown --checkpoint-activations pattern 'Blok': did you mean Block?"),
        ("net", "BatchNorm*", "Unknown --checkpoint-activations pattern 'BatchNorm*'"),
        ("compiled", "Block", "--checkpoint-activations cannot work on a compiled model"),
        ("counting", "Counting", "Counting, whose forward changes its buffer count"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(make: str, pattern: str, words: str) -> None:
    assert words in refused(World.alone(), make, pattern)
