"""What DistributedDataParallel costs two ranks, against two processes that train side by side and exchange nothing.

Three subjects take turns in the same two processes of one thread each: ours under ddp, a plain torch DDP loop, and
our single-process training on each rank by itself. All compute the same network on the same number of images.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import RunConfig, World, launch
from lockstep.jobs.job import Job, assemble

from .harness import Report, Series, interleave, verdict
from .loops import configured, first_samples, repeated, stepper

GOAL = 0.88
SAME = 0.02  # two medians nearer than this are the same
EACH = 64
STEPS = 4
ROUNDS = 8
PRECISIONS = ("fp32", "bf16")


def measure() -> Report:
    """Return the efficiency of both DDP loops in float32 and bfloat16."""
    # data "fake" is made of nothing: each subject repeats one batch.
    config = configured(
        model="resnet18", data="fake", image_size=32, batch=2 * EACH, batchnorm="local", strategy="ddp", devices=2
    )
    found = launch(on_rank, config)
    assert found is not None
    rows, shares = [], {}
    for precision in PRECISIONS:
        rates = {name: Series(tuple(values)) for name, values in found[precision].items()}
        ours, plain = rates["ours"].per(rates["independent"]), rates["plain"].per(rates["independent"])
        shares[precision] = ours.median, plain.median
        for name in rates:
            share = {"ours": ours.text(), "plain": plain.text()}.get(name, "")
            rows.append((precision, _NAMES[name], rates[name].text(".1f"), share))
    said = "; ".join(f"{name} {ours:.2f}, a plain DDP loop {plain:.2f}" for name, (ours, plain) in shares.items())
    holds = shares["bf16"][0] >= GOAL and all(ours > plain - SAME for ours, plain in shares.values())
    return Report(
        title="What DDP costs two ranks",
        finding=f"DDP on 2 ranks against two independent processes: {said} (goal: no less than the plain loop, and at "
        f"least {GOAL} in bf16, {verdict(holds)}).",
        columns=("precision", "subject", "images/s, both ranks", "÷ independent"),
        rows=rows,
        method=f"ResNet-18 with CIFAR stem, {EACH} images a rank, BatchNorm of each rank's own images, channels_last, "
        "gloo, one thread a rank. A round's rate counts from a barrier to the end of the slower rank; independent "
        "processes add their own rates.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each subject",
    )


_NAMES = {
    "independent": "independent: our training step in each process, nothing exchanged",
    "plain": "plain: DistributedDataParallel(model) as it comes, SGD as it comes",
    "ours": "ours: --strategy ddp",
}


def on_rank(config: RunConfig, world: World) -> dict[str, dict[str, list[float]]]:
    """Return images a second of both ranks by precision and subject (*collective*)."""
    torch.set_num_threads(1)
    found = {}
    for precision in PRECISIONS:
        series = interleave(_subjects(config, world, precision), rounds=ROUNDS)
        found[precision] = {name: list(one.values) for name, one in series.items()}
    return found


def _subjects(config: RunConfig, world: World, precision: str) -> dict[str, Callable[[], float]]:
    options = {"model": "resnet18", "data": "fake", "image_size": 32, "batchnorm": "local", "precision": precision}
    alone = assemble(configured(**options, batch=EACH, strategy="single"), World.alone())
    job = assemble(configured(**options, batch=2 * EACH, strategy="ddp"), world)
    return {
        "independent": _together(world, stepper(alone, repeated(alone), steps=STEPS), exchanging=False),
        "plain": _together(world, plain(alone, world), exchanging=True),
        "ours": _together(world, stepper(job, repeated(job), steps=STEPS), exchanging=True),
    }


def _together(world: World, run: Callable[[], float], *, exchanging: bool) -> Callable[[], float]:
    """Return a function that measures the images a second of all ranks (*collective*)."""

    def measured() -> float:
        world.barrier()
        own_s = run()
        if not exchanging:
            return float(world.sum(torch.tensor(EACH * STEPS / own_s, dtype=torch.float64)))
        return world.size * EACH * STEPS / float(world.max(torch.tensor(own_s, dtype=torch.float64)))

    return measured


def plain(job: Job, world: World) -> Callable[[], float]:
    """Return a function that trains `STEPS` steps with torch's DDP as it comes, and returns their seconds.

    The network is a fresh one like the job's, in its memory order and precision: the exchange is what differs.
    """
    model = DistributedDataParallel(_like(job))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x, y = first_samples(job)
    world.barrier()

    def run() -> float:
        begin_s = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            with job.precision.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begin_s

    return run


def _like(job: Job) -> Any:
    return assemble(job.config, World.alone()).model
