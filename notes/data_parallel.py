"""Chapter 3: one step by one thread, by DataParallel's threads and by two processes."""

from __future__ import annotations

import time
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .chapter import Chapter, Words, on_ranks

NETS = {"large operations": (512, 4, 256), "small operations": (16, 150, 64)}
"""Width, layers and batch of a net."""
RANKS = 2
ROUNDS = 200
FORWARD, BACKWARD = "forward, ms", "backward, ms"
Times = dict[str, float]


def network(width: int, layers: int) -> nn.Sequential:
    """Return square layers with an activation after each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def in_threads(model: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a forward pass in threads, as `parallel_apply` runs it; they share the parameters."""
    parts = x.chunk(RANKS)
    outputs: dict[int, Tensor] = {}

    def run(replica: int) -> None:
        torch.set_num_threads(1)  # holds for this thread
        outputs[replica] = model(parts[replica])

    threads = [Thread(target=run, args=(replica,)) for replica in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([outputs[replica] for replica in range(len(parts))])


def step(forward: Any, model: nn.Module, x: Tensor) -> Times:
    """Return the duration of both passes."""
    model.zero_grad()
    begin = time.perf_counter()
    loss = forward(x).square().mean()
    between = time.perf_counter()
    loss.backward()
    return {FORWARD: 1e3 * (between - begin), BACKWARD: 1e3 * (time.perf_counter() - between)}


def durations() -> dict[str, dict[str, Times]]:
    """Return the shortest durations by net and method; the methods take turns (*collective*)."""
    torch.set_num_threads(1)
    results = {}
    for name, (width, layers, batch) in NETS.items():
        x = torch.randn(batch, width)
        model = network(width, layers)
        replica = DistributedDataParallel(network(width, layers))
        rounds: dict[str, list[Times]] = {"one thread": [], "DP, 2 threads": [], "DDP, 2 processes": []}
        for _ in range(ROUNDS):
            dist.barrier()
            if dist.get_rank() == 0:
                rounds["one thread"].append(step(model, model, x))
                rounds["DP, 2 threads"].append(step(lambda x: in_threads(model, x), model, x))  # noqa: B023
            dist.barrier()
            rounds["DDP, 2 processes"].append(step(replica, replica, x.chunk(RANKS)[dist.get_rank()]))
        results[name] = {
            method: {key: round(min(times[key] for times in series), 2) for key in (FORWARD, BACKWARD)}
            for method, series in rounds.items()
            if series
        }
    return results


def measure() -> dict[str, Any]:
    """Return the durations on rank 0, and how much faster than one thread both methods are."""
    results: dict[str, Any] = on_ranks(durations, RANKS)[0]
    for methods in results.values():
        alone = methods["one thread"]
        for times in methods.values():
            times["forward, ratio"] = round(alone[FORWARD] / times[FORWARD], 2)
            times["step, ratio"] = round(
                (alone[FORWARD] + alone[BACKWARD]) / (times[FORWARD] + times[BACKWARD]),
                2,
            )
    return results


def draw(numbers: dict[str, Any], figure: Any, words: Words) -> None:
    """Draw the passes of each method, stacked."""
    for axes, (name, methods) in zip(figure.subplots(1, 2), numbers.items(), strict=True):
        labels = [words(method).replace(", ", ",\n") for method in methods]
        bottom = [0.0] * len(methods)
        for key, colour in ((FORWARD, "#2980b9"), (BACKWARD, "#c0392b")):
            values = [times[key] for times in methods.values()]
            bars = axes.bar(labels, values, bottom=bottom, color=colour, label=words(key.removesuffix(", ms")))
            axes.bar_label(bars, fmt="%.3g", label_type="center", color="white")
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set_ylabel(words("ms per step"))
        axes.set_title(words(name))
        axes.tick_params(axis="x", labelsize=9)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, ncols=2, loc="outside upper center")


def check(answer: str, numbers: dict[str, Any]) -> bool:
    """Check how many of eight GPUs get samples of a batch of ten."""
    return int(answer) == len(torch.arange(10).chunk(8))


CHAPTER = Chapter(
    measure,
    draw,
    check,
    chinese={
        "one thread": "单线程",
        "DP, 2 threads": "DP, 2 个线程",
        "DDP, 2 processes": "DDP, 2 个进程",
        "forward": "前向",
        "backward": "反向",
        "ms per step": "每步耗时（ms）",
        "large operations": "大算子",
        "small operations": "小算子",
    },
)
