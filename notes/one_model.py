"""Chapter 1: two ranks against one process, by rounding and by a fault."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks

BATCH, STEPS = 64, 200
EVEN, UNEVEN = (32, 32), (33, 31)
"""Samples of the two ranks. DDP averages their means, which is exact for the even shares alone."""
RATE, TAME_RATE = 0.5, 0.05
"""A learning rate close to the limit of this model, and one far below it."""
CURVES = {
    "float32, rounding": (torch.float32, EVEN, RATE),
    "float64, rounding": (torch.float64, EVEN, RATE),
    "float32, fault": (torch.float32, UNEVEN, RATE),
    "float64, fault": (torch.float64, UNEVEN, RATE),
    "float32, rounding, small learning rate": (torch.float32, EVEN, TAME_RATE),
}


def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 handwritten digits (1797, 64) in float64, and their classes (1797,)."""
    with resources.as_file(resources.files("lockstep.data") / "digits.npz") as path, np.load(path) as file:
        return torch.tensor(file["images"]).flatten(1).double() / 16, torch.tensor(file["labels"]).long()


def network(dtype: torch.dtype) -> nn.Sequential:
    """Return a network whose weights are the same on every call, up to the precision."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).to(dtype)


def train(dtype: torch.dtype, shares: tuple[int, ...], rate: float) -> list[Tensor]:
    """Return all weights after each step; with several shares on several ranks (*collective*)."""
    inner = network(dtype)
    model: nn.Module = DistributedDataParallel(inner) if len(shares) > 1 else inner
    rank = dist.get_rank() if len(shares) > 1 else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    images, classes = digits()
    generator = torch.Generator().manual_seed(1)
    weights = []
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        own = batch.split(shares)[rank]
        loss = nn.functional.cross_entropy(model(images[own].to(dtype)), classes[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in inner.parameters()]).double())
    return weights


def differences() -> dict[str, list[float]]:
    """Return the relative difference between two ranks and one process, by curve and step (*collective*)."""

    def relative(ranks: list[Tensor], alone: list[Tensor]) -> list[float]:
        return [float((a - b).norm() / b.norm()) for a, b in zip(ranks, alone, strict=True)]

    curves = {
        name: relative(train(dtype, shares, rate), train(dtype, (BATCH,), rate))
        for name, (dtype, shares, rate) in CURVES.items()
    }
    dtype, shares, rate = CURVES["float32, rounding"]
    curves["float32, the same two ranks twice"] = relative(train(dtype, shares, rate), train(dtype, shares, rate))
    return curves


def measure() -> dict[str, Any]:
    """Return orders of a sum, and the relative difference of the weights by curve and step."""
    return {
        "sums": {"(0.1 + 0.2) + 0.3": (0.1 + 0.2) + 0.3, "0.1 + (0.2 + 0.3)": 0.1 + (0.2 + 0.3)},
        "differences": {
            name: {str(step): values[step - 1] for step in (1, 2, 5, *range(10, STEPS + 1, 10))}
            for name, values in on_ranks(differences, 2)[0].items()
        },
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the differences by step, on a logarithmic axis."""
    axes = figure.subplots()
    for name, style in (
        ("float64, fault", {"color": "#c0392b", "linewidth": 4, "alpha": 0.35}),
        ("float32, fault", {"color": "#c0392b", "linestyle": "--"}),
        ("float32, rounding", {"color": "#2471a3"}),
        ("float64, rounding", {"color": "#1e8449"}),
    ):
        curve = numbers["differences"][name]
        axes.semilogy([int(step) for step in curve], [*curve.values()], label=words(name), **style)
    axes.set_xlabel(words("optimizer step"))
    axes.set_ylabel(words("relative difference of the weights"))
    axes.set_title(words("Two ranks against one process"))
    axes.legend(loc="lower right", fontsize=9)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the value at which a float32 sum of ones stops to grow."""
    return float(answer) == 2**24


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "float64, fault": "float64，错误",
        "float32, fault": "float32，错误",
        "float32, rounding": "float32，舍入",
        "float64, rounding": "float64，舍入",
        "optimizer step": "优化器步数",
        "relative difference of the weights": "权重的相对差异",
        "Two ranks against one process": "两个 rank 与单进程之差",
    },
)
