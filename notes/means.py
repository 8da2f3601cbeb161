"""Chapter 7: the gradient of uneven shares, averaged and summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks

SHARES = {"4 + 4": (4, 4), "5 + 3": (5, 3), "6 + 2": (6, 2), "7 + 1": (7, 1)}
"""Samples of the two ranks, out of eight."""


def batch() -> tuple[Tensor, Tensor]:
    """Return eight samples (8, 5) and their targets (8, 1)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 1, generator=generator, dtype=torch.float64)


def network() -> nn.Linear:
    """Return a linear model whose weights are the same on every call."""
    torch.manual_seed(0)
    return nn.Linear(5, 1, dtype=torch.float64)


def gradient(shares: tuple[int, int], *, is_weighted: bool) -> list[float]:
    """Return the gradient that DistributedDataParallel computes on this rank (*collective*)."""
    rank, (x, y) = dist.get_rank(), batch()
    x, y = (part.split(shares)[rank] for part in (x, y))
    model = DistributedDataParallel(network())
    loss = nn.functional.mse_loss(model(x), y)
    if is_weighted:  # DDP divides by the number of ranks
        loss = loss * len(x) * len(shares) / sum(shares)
    loss.backward()
    weight = model.module.weight.grad
    assert weight is not None
    values: list[float] = weight.flatten().tolist()
    return values


def gradients() -> dict[str, dict[str, list[float]]]:
    """Return this rank's gradients by division and shares (*collective*)."""
    return {
        name: {shares: gradient(sizes, is_weighted=is_weighted) for shares, sizes in SHARES.items()}
        for name, is_weighted in (("mean of means", False), ("divided once", True))
    }


def measure() -> dict[str, Any]:
    """Return the relative error of the gradient, by division and shares."""
    model, (x, y) = network(), batch()
    nn.functional.mse_loss(model(x), y).backward()
    assert model.weight.grad is not None
    reference = model.weight.grad.flatten()

    def error(values: list[float]) -> float:
        return float((torch.tensor(values, dtype=reference.dtype) - reference).norm() / reference.norm())

    return {
        name: {shares: error(values) for shares, values in by_shares.items()}
        for name, by_shares in on_ranks(gradients, 2)[0].items()
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the error of the mean of means, by shares."""
    axes = figure.subplots()
    errors = numbers["mean of means"]
    bars = axes.bar([*errors], [100 * error for error in errors.values()], color="#c0392b")
    axes.bar_label(bars, fmt="%.1f %%")
    axes.set_xlabel(words("samples on rank 0 + rank 1"))
    axes.set_ylabel(words("error of the gradient, %"))
    axes.set_title(words("DDP averages the ranks' means"))


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the factor on rank 1's loss for shares of 6 and 2 samples."""
    return abs(float(answer) - 2 * 2 / 8) < 1e-9


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "samples on rank 0 + rank 1": "rank 0 + rank 1 的样本数",
        "error of the gradient, %": "梯度误差（%）",
        "DDP averages the ranks' means": "DDP 对各 rank 的均值再取平均",
    },
)
