"""What our training loop costs a step over a bare one, metrics recorded, where the model costs next to nothing.

Ours is `lockstep.train`, whole: each step's loss and rate go to steps.jsonl. The bare loop is what a tutorial shows:
shuffled indices, forward, cross-entropy, backward, step; it records nothing. Both read the same tensors.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import World
from lockstep.job import assemble

from .harness import Report, interleave, verdict
from .loops import configured, engine_step_s

GOAL_US = 15.0
BATCH = 64
STEPS = 500
ROUNDS = 60


def images() -> tuple[TensorDataset, TensorDataset]:
    """Return digits-like tensors (1, 8, 8): enough for all steps of a block without the end of an epoch."""
    generator = torch.Generator().manual_seed(0)

    def some(samples: int) -> TensorDataset:
        x = torch.randn(samples, 1, 8, 8, generator=generator)
        return TensorDataset(x, torch.randint(10, (samples,), generator=generator))

    return some(BATCH * (STEPS + 1)), some(BATCH)


def measure() -> Report:
    """Return microseconds a step of both loops, and their difference."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.jsonl"
            found = interleave(
                {"bare": bare(fused=False), "ours": ours(path), "fused": bare(fused=True)}, rounds=ROUNDS, warm_up=3
            )
    finally:
        torch.set_num_threads(threads)
    over, over_fused = found["ours"].minus(found["bare"]), found["ours"].minus(found["fused"])
    return Report(
        title="What the loop costs a step",
        finding=f"Our loop, metrics recorded, costs {over.median:+.1f} µs a step over a bare one with SGD as it comes "
        f"(goal: at most +{GOAL_US:.0f}, {verdict(over.median <= GOAL_US)}), and {over_fused.median:+.1f} over one "
        "with the fused SGD that ours uses.",
        columns=("loop", "µs a step", "ours over it, µs"),
        rows=(
            ("lockstep.train, losses and rates of all steps in steps.jsonl", found["ours"].text(".1f"), ""),
            ("bare, torch.optim.SGD as it comes", found["bare"].text(".1f"), over.text("+.1f")),
            ("bare, SGD(fused=True), which ours uses", found["fused"].text(".1f"), over_fused.text("+.1f")),
        ),
        method=f"Model `mlp` (64–128–10), batch {BATCH}, float32, SGD with momentum and weight decay, one thread, one "
        f"process. A block is {STEPS} steps without evaluation or checkpoint; ours is timed from the record of its "
        "first step to the record of its last, so that recording is in it.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each loop",
    )


def ours(path: Path) -> Callable[[], float]:
    """Return a function that measures our loop: µs a step."""
    config = configured(
        model="mlp", data="benchmarks.overhead:images", batch=BATCH, precision="fp32", max_steps=STEPS + 1
    )
    return lambda: engine_step_s(config, path) * 1e6


def bare(*, fused: bool) -> Callable[[], float]:
    """Return a function that measures the bare loop: µs a step."""
    x, y = images()[0].tensors
    model = assemble(configured(model="mlp", data="benchmarks.overhead:images", batch=BATCH), World.alone()).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=fused or None)
    return lambda: bare_step_s(model, optimizer, x, y) * 1e6


def bare_step_s(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Train a block and return the mean seconds of a step."""
    order = torch.randperm(len(x))
    model.train()
    begin_s = time.perf_counter()
    for step in range(STEPS):
        index = order[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - begin_s) / STEPS
