"""PyramidNet-110 with α 48 on CIFAR-10, one process: ours against the loop that public examples train it with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep import World
from lockstep.job import assemble

from .harness import Report, interleave, verdict
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
    shared = {"model": MODEL, "data": "cifar10", "data_dir": folder, "augment": ["crop", "flip"], "batch": BATCH}
    job = assemble(configured(**shared), World.alone())
    ours = stepper(job, fed(job), steps=STEPS)
    # The same network from the same seed, in the form in which the examples use it.
    plain = assemble(configured(**shared, precision="fp32", channels_last="off"), World.alone()).model
    loop = PlainLoop(plain, folder, batch=BATCH)
    rates: dict[str, Callable[[], float]] = {
        "plain": lambda: BATCH / loop.run(STEPS),
        "ours": lambda: BATCH * STEPS / ours(),
    }
    found = interleave(rates, rounds=ROUNDS)
    gain = found["ours"].per(found["plain"])
    return Report(
        title="PyramidNet on CIFAR-10, one process",
        finding=f"PyramidNet-110 α48 trains {gain.median:.2f} times as fast as in a plain loop on this CPU "
        f"(goal: {GOAL:.0f}, {verdict(gain.median >= GOAL)}).",
        columns=("loop", "images/s", "ours ÷ it"),
        rows=(
            (
                f"ours: {job.precision.name}, channels_last, crop and flip of whole batches",
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
        method=f"Batch {BATCH}, SGD 0.1 / 0.9 / 1e-4, padded crop and flip, {torch.get_num_threads()} threads in the "
        "process that trains. The plain loop's workers start, and its first batch is there, before its clock does.",
        n=f"{ROUNDS} rounds of {STEPS} steps of each",
    )
