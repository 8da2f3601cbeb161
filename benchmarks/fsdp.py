"""What a step of --strategy fsdp costs, against a loop by hand around fully_shard, in the same two processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep import RunConfig, World, launch
from lockstep.exchange.blocks import find_blocks
from lockstep.jobs.job import assemble

from .harness import Report, Series, interleave, verdict
from .loops import configured, first_samples, repeated, stepper

GOAL, EACH, STEPS, ROUNDS = 1.05, 32, 4, 10
OPTIONS: dict[str, Any] = {"model": "resnet18", "data": "fake", "image_size": 32, "batchnorm": "local"}


def measure() -> Report:
    """Return the ratio of step times."""
    config = configured(**OPTIONS, batch=2 * EACH, strategy="fsdp", devices=2)
    found = launch(on_rank, config)
    assert found is not None
    seconds = {name: Series(tuple(values)) for name, values in found.items()}
    ratio = seconds["ours"].per(seconds["by hand"])
    return Report(
        title="What a step of fsdp costs",
        finding=f"A step of --strategy fsdp takes {ratio.text()} times a step of a loop by hand around torch's "
        f"fully_shard (goal {GOAL}, {verdict(ratio.median <= GOAL)}).",
        columns=("subject", "ms a step", "÷ by hand"),
        rows=[
            (name, (Series(tuple(1000 * value / STEPS for value in each.values))).text(".1f"), share)
            for (name, each), share in zip(seconds.items(), ("", ratio.text()), strict=True)
        ],
        method=f"ResNet-18 with CIFAR stem, {EACH} images a rank, BatchNorm of each rank's own images, SGD with "
        "momentum, two ranks of one thread, gloo. By hand: fully_shard on the same blocks and on the model, with "
        "torch's defaults. A round takes the slower rank's seconds, from a barrier on.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each",
    )


def on_rank(config: RunConfig, world: World) -> dict[str, list[float]]:
    """Return the seconds of `STEPS` steps by subject (*collective*)."""
    torch.set_num_threads(1)
    job = assemble(config, world)
    for optimizer in job.optimizers:
        job.exchange.begin_step(optimizer)  # as the session does before a step
    subjects = {"by hand": _by_hand(world), "ours": stepper(job, repeated(job), steps=STEPS)}

    def together(run: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            world.barrier()
            return float(world.max(torch.tensor(run(), dtype=torch.float64)))

        return measured

    series = interleave({name: together(run) for name, run in subjects.items()}, rounds=ROUNDS)
    return {name: list(one.values) for name, one in series.items()}


def _by_hand(world: World) -> Callable[[], float]:
    alone = assemble(configured(**OPTIONS, batch=EACH, strategy="single", channels_last="off"), World.alone())
    model, (x, y) = alone.model, first_samples(alone)
    mesh = init_device_mesh("cpu", (world.size,))
    for module in (*find_blocks(model, ()), model):
        fully_shard(module, mesh=mesh)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def run() -> float:
        begin_s = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begin_s

    return run
