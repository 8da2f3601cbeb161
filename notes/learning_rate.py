"""Chapter 12: the error after ten epochs, by batch and learning rate."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import torch
from torch import nn

from .chapter import Chapter, Words
from .digits import load

RATES = [0.0125 * 2**power for power in range(9)]
SEEDS = 5
EPOCHS = 10
VARIANTS = {
    "batch 64": (64, EPOCHS, 0),
    "batch 512": (512, EPOCHS, 0),
    "batch 512, warm-up": (512, EPOCHS, 2),
    "batch 512, as many steps": (512, 8 * EPOCHS, 0),
}
"""Batch, epochs, epochs of warm-up. An epoch has 1,437 samples: 23 steps of 64, or 3 of 512."""
STYLES = {
    "batch 64": ("#2c3e50", "o-"),
    "batch 512": ("#c0392b", "o-"),
    "batch 512, warm-up": ("#e67e22", "o--"),
    "batch 512, as many steps": ("#7f8c8d", "s:"),
}


def test_error(batch: int, epochs: int, warmup: int, rate: float, seed: int) -> float:
    """Train a small network by plain SGD. Return the share of test digits that it gets wrong."""
    (x, y), (test_x, test_y) = load("train"), load("test")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    rising = warmup * math.ceil(len(x) / batch)  # steps, of optimizer.step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, rising)))
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((model(test_x).argmax(1) != test_y).float().mean())


def measure() -> dict[str, Any]:
    """Return the test error by variant and learning rate: the mean over the seeds."""
    torch.set_num_threads(1)  # the matrices are small
    return {
        name: {f"{rate:g}": mean(test_error(*variant, rate, seed) for seed in range(SEEDS)) for rate in RATES}
        for name, variant in VARIANTS.items()
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the error over the learning rate, a line for each batch."""
    axes = figure.subplots()
    for name, (colour, style) in STYLES.items():
        errors = numbers[name]
        rates = [float(rate) for rate in errors]
        axes.plot(rates, [100 * error for error in errors.values()], style, color=colour, label=words(name))
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes.set_yscale("log")
    axes.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_xlabel(words("learning rate"))
    axes.set_ylabel(words("test error, %"))
    axes.set_title(words("Digits, 10 epochs, plain SGD"))
    axes.legend(loc="upper center")


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the steps of a schedule: 10 epochs of 50,000 samples, 4 ranks with 64 each, two micro-batches a step."""
    return float(answer) == 10 * math.ceil(50_000 / (4 * 64 * 2))


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "batch 64": "batch 64",
        "batch 512": "batch 512",
        "batch 512, warm-up": "batch 512，预热",
        "batch 512, as many steps": "batch 512，步数相同",
        "learning rate": "学习率",
        "test error, %": "测试错误率（%）",
        "Digits, 10 epochs, plain SGD": "digits，10 个 epoch，普通 SGD",
    },
)
