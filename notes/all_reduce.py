"""Chapter 5: the duration of an all-reduce by size, through gloo and through shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

import lockstep
from lockstep import RunConfig, World

from .chapter import Chapter, Words

RANKS = 2
ROUNDS = 100
SIZES = {"1 KiB": (1 << 10, 20), "16 KiB": (1 << 14, 20), "256 KiB": (1 << 18, 5)} | {
    f"{size} MiB": (size << 20, runs) for size, runs in ((1, 2), (4, 1), (16, 1))
}
"""Bytes, and all-reduces per round."""
GLOO, MEMORY = "gloo", "shared memory"


def duration(exchange: Callable[[Tensor], Any], tensor: Tensor, runs: int) -> float:
    """Return the seconds of one exchange, averaged over `runs` (*collective*)."""
    exchange(tensor)
    begin = time.perf_counter()
    for _ in range(runs):
        exchange(tensor)
    return (time.perf_counter() - begin) / runs


def durations(config: RunConfig, world: World) -> dict[str, dict[str, float]]:
    """Return milliseconds by way and size: the shortest of several rounds in which both take turns (*collective*)."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Tensor], Any]] = {
        GLOO: lambda tensor: dist.all_reduce(tensor, group=world.group),
        MEMORY: world.sum_,
    }
    results: dict[str, dict[str, float]] = {name: {} for name in ways}
    for size, (count, runs) in SIZES.items():
        tensor = torch.zeros(count // 4)
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, exchange in ways.items():
                world.barrier()
                rounds[name].append(duration(exchange, tensor, runs))
        for name, seconds in rounds.items():
            results[name][size] = float(f"{1e3 * min(seconds):.3g}")
    return results


def measure() -> dict[str, Any]:
    """Return milliseconds by way and size, and the bus bandwidth at the largest one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = lockstep.override(lockstep.recipe("digits"), strategy="ddp", devices=RANKS, accelerator="cpu", output=None)
    milliseconds = lockstep.launch(durations, config)
    assert milliseconds is not None
    largest = [*SIZES][-1]
    traffic = 2 * (RANKS - 1) / RANKS * SIZES[largest][0]
    return {
        "milliseconds": milliseconds,
        "bus bandwidth, GB/s": {
            name: round(traffic / by_size[largest] / 1e6, 2) for name, by_size in milliseconds.items()
        },
    }


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw milliseconds over bytes, both logarithmic."""
    axes = figure.subplots()
    for (name, by_size), colour in zip(numbers["milliseconds"].items(), ("#c0392b", "#2980b9"), strict=True):
        axes.loglog([SIZES[size][0] for size in by_size], [*by_size.values()], "o-", color=colour, label=words(name))
    axes.set_xticks([count for count, _ in SIZES.values()], [*SIZES], rotation=20)
    axes.minorticks_off()
    axes.set_xlabel(words("size of the tensor"))
    axes.set_ylabel(words("ms per all-reduce"))
    axes.set_title(words("Latency, then bandwidth: two ranks of one host"))
    axes.legend(frameon=False)


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check the milliseconds of 100 MB in a ring of 8 links with 12.5 GB/s."""
    return abs(float(answer) - 1e3 * 2 * 7 / 8 * 100e6 / 12.5e9) < 0.05


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        GLOO: "gloo",
        MEMORY: "共享内存",
        "size of the tensor": "张量大小",
        "ms per all-reduce": "每次 all-reduce 耗时（ms）",
        "Latency, then bandwidth: two ranks of one host": "先是延迟，后是带宽：同一台主机上的两个 rank",
    },
)
