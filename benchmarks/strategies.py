"""The strategies side by side on this machine: one process, DataParallel over two threads, DDP on two ranks.

All train the same global batch. One process has both processors' threads; ranks and replicas have one each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep import RunConfig, World, launch
from lockstep.jobs.job import assemble

from .harness import Report, Series, interleave
from .loops import configured, repeated, stepper

DEVICES = 2
BATCH = 128
STEPS = 2
ROUNDS = 5
MODELS = ("resnet18", "pyramidnet-110-48")


def measure() -> Report:
    """Return each strategy's images a second, and its quotient to one process."""
    found = launch(on_rank, configured(model="mlp", data="digits", strategy="ddp", devices=DEVICES))
    assert found is not None
    rows, said = [], []
    for model in MODELS:
        rates = {name: Series(tuple(values)) for name, values in found[model].items()}
        for name, rate in rates.items():
            share = rate.per(rates["single"])
            rows.append((model, _NAMES[name], rate.text(".1f"), "" if name == "single" else share.text()))
            if name != "single":
                said.append(f"{name} {share.median:.2f} ({model})")
    return Report(
        title="The strategies side by side",
        finding=f"Images a second against one process with {DEVICES} threads: {', '.join(said)}.",
        columns=("model", "strategy", "images/s", "÷ single"),
        rows=rows,
        method=f"Global batch {BATCH}, one batch repeated, the precision that auto takes, channels_last, SGD. "
        "BatchNorm as --batchnorm auto has it: synchronised under ddp (the same model as single), local under dp.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each",
    )


_NAMES = {
    "single": f"single, {DEVICES} threads",
    "dp": f"dp, {DEVICES} replicas in threads",
    "ddp": f"ddp, {DEVICES} ranks of one thread",
    "ddp local": f"ddp with --batchnorm local, {DEVICES} ranks of one thread",
}


def on_rank(config: RunConfig, world: World) -> dict[str, dict[str, list[float]]]:
    """Return images a second by model and strategy (*collective*); rank 0 alone runs what needs one process."""
    found = {}
    for model in MODELS:
        series = interleave(_subjects(model, world), rounds=ROUNDS)
        found[model] = {name: list(one.values) for name, one in series.items()}
    return found


def _subjects(model: str, world: World) -> dict[str, Callable[[], float]]:
    options = {"model": model, "data": "fake", "image_size": 32, "batch": BATCH}
    torch.set_num_threads(DEVICES)  # DataParallel shares out what is there when it is made
    ones = {}
    for name in ("single", "dp"):
        job = assemble(configured(**options, strategy=name, devices=DEVICES if name == "dp" else None), World.alone())
        ones[name] = stepper(job, repeated(job), steps=STEPS)
    both = {}
    for name, batchnorm in (("ddp", "auto"), ("ddp local", "local")):
        job = assemble(configured(**options, strategy="ddp", batchnorm=batchnorm), world)
        both[name] = stepper(job, repeated(job), steps=STEPS)

    def here(run: Callable[[], float]) -> Callable[[], float]:
        return lambda: _timed(world, DEVICES, run if world.is_main else lambda: 0.0)

    return {name: here(run) for name, run in ones.items()} | {
        name: lambda run=run: _timed(world, 1, run) for name, run in both.items()
    }


def _timed(world: World, threads: int, run: Callable[[], float]) -> float:
    """Return images a second by the slowest rank's clock (*collective*)."""
    torch.set_num_threads(threads)
    world.barrier()
    return BATCH * STEPS / float(world.max(torch.tensor(run(), dtype=torch.float64)))
