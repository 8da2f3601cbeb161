"""PyramidNet-110 with α 48 on CIFAR-10, one process: ours against the loop that public examples train it with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep import World, hardware
from lockstep.jobs.job import assemble
from lockstep.training.precision import resolve

from .harness import Apart, Report, interleave, verdict
from .images import cifar10
from .loops import configured, fed, stepper
from .reference import PlainLoop

GOAL = 2.0
MODEL = "pyramidnet-110-48"
BATCH = 64
STEPS = 6
ROUNDS = 7


def measure() -> Report:
    """Return images a second of both, and their quotient."""
    folder = cifar10()
    with Apart(_plain, folder) as plain, Apart(_ours, folder) as ours:
        found = interleave({"plain": plain, "ours": ours}, rounds=ROUNDS)
    precision = resolve("auto", torch.device("cpu"))
    gain = found["ours"].per(found["plain"])
    return Report(
        title="PyramidNet on CIFAR-10, one process",
        finding=f"PyramidNet-110 α48 trains {gain.median:.2f} times as fast as in a plain loop on this CPU "
        f"(goal: {GOAL:.0f}, {verdict(gain.median >= GOAL)}).",
        columns=("loop", "images/s", "ours ÷ it"),
        rows=(
            (
                f"ours: {precision}, channels_last, crop and flip of whole batches",
                found["ours"].text(".1f"),
                "",
            ),
            (
                "plain: float32, contiguous, torchvision transforms per image in 4 workers, loss and accuracy printed "
                "per batch",
                found["plain"].text(".1f"),
                gain.text(),
            ),
        ),
        method=f"Batch {BATCH}, SGD 0.1 / 0.9 / 1e-4, padded crop and flip, {hardware.cpus()} threads in the "
        "process that trains, a process for each loop. The plain loop starts its workers "
        "and has its first batch before its clock starts.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each",
    )


def _shared(folder: Path) -> dict[str, Any]:
    augment = ["crop", "flip"]
    return {"model": MODEL, "data": "cifar10", "data_dir": folder, "augment": augment, "batch": BATCH}


def _ours(folder: Path) -> Callable[[], float]:
    """Return what measures our loop in images a second."""
    job = assemble(configured(**_shared(folder)), World.alone())
    run = stepper(job, fed(job), steps=STEPS)
    return lambda: BATCH * STEPS / run()


def _plain(folder: Path) -> Callable[[], float]:
    """Return what measures the plain loop: the same network from the same seed, in the form that examples use."""
    config = configured(**_shared(folder), precision="fp32", channels_last="off")
    loop = PlainLoop(assemble(config, World.alone()).model, folder, batch=BATCH)
    return lambda: BATCH / loop.run(STEPS)
