"""Chapter 13: where the second process's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks

BATCH = 64
ROUNDS = 9
BLOCK_S = 0.2
"""Length of a variant's turn, about."""
Step = Callable[[], object]


def convolutions() -> tuple[nn.Module, Tensor]:
    """Return a network that computes much with few weights, and a batch (64, 3, 16, 16)."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    return model, torch.randn(BATCH, 3, 16, 16)


def wide_layers() -> tuple[nn.Module, Tensor]:
    """Return a network of many weights, and a batch (64, 64)."""
    model = nn.Sequential(
        *(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()),
        *(nn.Linear(2048, 10),),
    )
    return model, torch.randn(BATCH, 64)


NETWORKS = {"convolutions": convolutions, "wide layers": wide_layers}


def step_of(model: nn.Module, x: Tensor, *, exchanges: bool = True) -> Step:
    """Return a training step on the samples `x`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    y = torch.arange(len(x)) % 10

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not exchanges else nullcontext():
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def step_ms(step: Step, steps: int) -> float:
    """Return the time of a step: the mean over a turn. A GPU would need `torch.accelerator.synchronize()` twice."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return 1000 * (time.perf_counter() - start) / steps


def timed(name: str) -> dict[str, float]:
    """Return the median time of a step in ms, by variant (*collective*)."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    parallel = DistributedDataParallel(NETWORKS[name]()[0])
    half, quarter = BATCH // 2, BATCH // 4
    uneven = x[quarter:] if rank == 0 else x[:quarter]
    alone = {"one, 64": step_of(model, x), "one, 32": step_of(model, x[:half])}
    together = {
        "two, 32 + 32": step_of(parallel, x[:half]),
        "two, 48 + 16": step_of(parallel, uneven),
        "two, 64 + 64": step_of(parallel, x),
    }
    together["two, 32 + 32, no exchange"] = step_of(parallel, x[:half], exchanges=False)
    variants = alone | together
    lengths = torch.zeros(len(variants))  # steps of a turn
    for number, (variant, step) in enumerate(variants.items()):
        if variant in together or rank == 0:
            step_ms(step, 3)  # the first steps allocate, and choose algorithms
            lengths[number] = max(2, 1000 * BLOCK_S / step_ms(step, 5))
        dist.barrier()
    dist.broadcast(lengths, 0)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(ROUNDS):  # in turns, so that a slow moment of the machine slows all variants
        for number, (variant, step) in enumerate(variants.items()):
            dist.barrier()
            if variant in together or rank == 0:
                times[variant].append(step_ms(step, int(lengths[number])))
    dist.barrier()
    return {variant: median(turns) for variant, turns in times.items() if turns}


def measure() -> dict[str, Any]:
    """Return the time of a step in ms by network and variant, and the parts of the two processes' step."""
    numbers: dict[str, Any] = {}
    for name in NETWORKS:
        first, second = on_ranks(timed, 2, name)
        times = {variant: mean((ms, second.get(variant, ms))) for variant, ms in first.items()}
        one, two, computing = times["one, 64"], times["two, 32 + 32"], times["two, 32 + 32, no exchange"]
        numbers[name] = {
            "step, ms": times,
            "parts of a step of two, ms": {
                "32 samples, the other core idle": times["one, 32"],
                "both cores are busy": computing - times["one, 32"],
                "exchange": two - computing,
            },
            "speed-up": one / two,
            "speed-up without exchange": one / computing,
            "speed-up, twice the samples": 2 * one / times["two, 64 + 64"],
            "parameters": sum(parameter.numel() for parameter in NETWORKS[name]()[0].parameters()),
        }
    return numbers


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the step of one process, and the parts of the step of two, by network."""
    axes = figure.subplots()
    colours = ["#2c3e50", "#e67e22", "#c0392b"]
    labels = []
    for row, (name, values) in enumerate(numbers.items()):
        y, is_first = 2.5 * row, row == 0
        one = values["step, ms"]["one, 64"]
        axes.barh(y, one, color="#2980b9", height=0.8, label=words("64 samples") if is_first else None)
        left = 0.0
        for colour, (part, ms) in zip(colours, values["parts of a step of two, ms"].items(), strict=True):
            axes.barh(y + 1, ms, left=left, color=colour, height=0.8, label=words(part) if is_first else None)
            left += ms
        goal = words("half of one process's step")
        axes.plot([one / 2] * 2, [y + 0.5, y + 1.5], "k--", label=goal if is_first else None)
        labels += [f"{words(name)}: {words(processes)}" for processes in ("one process", "two processes")]
    axes.set_yticks([0, 1, 2.5, 3.5], labels)
    axes.invert_yaxis()
    axes.set_xlabel(words("time of a step of 64 samples, ms"))
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the speed-up of 8 devices: of a step of 100 ms, 10 ms do not shrink, and the exchange adds 5 ms."""
    return abs(float(answer) - 100 / (10 + 90 / 8 + 5)) < 0.05


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "half of one process's step": "单进程一步的一半",
        "64 samples": "64 个样本",
        "32 samples, the other core idle": "32 个样本，另一个核空闲",
        "both cores are busy": "两个核同时忙",
        "exchange": "通信",
        "convolutions": "卷积网络",
        "wide layers": "宽全连接网络",
        "one process": "一个进程",
        "two processes": "两个进程",
        "time of a step of 64 samples, ms": "64 个样本一步的时间（ms）",
    },
)
