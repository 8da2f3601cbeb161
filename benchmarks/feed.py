"""Whether the data keeps up: training on CIFAR-10, cropped and flipped, against one batch over and over."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep import World
from lockstep.jobs.job import Job, assemble

from .harness import Report, Series, interleave, verdict
from .images import cifar10
from .loops import configured, fed, repeated, stepper

GOAL = 0.97
# model: (batch, steps in a block, rounds)
MODELS = {"pyramidnet-110-48": (64, 4, 6), "convnet-small": (128, 20, 12)}


def measure() -> Report:
    """Return images a second of both for each model, and their quotients."""
    rows, shares = [], {}
    for model, (batch, steps, rounds) in MODELS.items():
        job = assemble(
            configured(model=model, data="cifar10", data_dir=cifar10(), augment=["crop", "flip"], batch=batch, lr=0.01),
            World.alone(),
        )
        found = _measure(job, steps, rounds)
        shares[model] = found["fed"].per(found["repeated"])
        rates = (found["fed"].text(".0f"), found["repeated"].text(".0f"))
        rows.append((model, str(batch), job.precision.name, *rates, shares[model].text(".3f"), f"{rounds} × {steps}"))
    said = " and ".join(f"{share.median:.3f} ({model})" for model, share in shares.items())
    holds = all(share.median >= GOAL for share in shares.values())
    return Report(
        title="Whether the data keeps up",
        finding=f"Fed with CIFAR-10, cropped and flipped, training runs at {said} of its rate on one repeated batch "
        f"(goal: at least {GOAL}, {verdict(holds)}).",
        columns=("model", "batch", "precision", "fed, images/s", "repeated, images/s", "fed ÷ repeated", "n"),
        rows=rows,
        method=f"One process, {torch.get_num_threads()} threads, channels_last. Both are our training step with the "
        "same model and optimizer in turns; crop and flip are computed by the process that trains.",
        n="rounds × steps of each in the table",
    )


def _measure(job: Job, steps: int, rounds: int) -> dict[str, Series]:
    runs = {"fed": stepper(job, fed(job), steps=steps), "repeated": stepper(job, repeated(job), steps=steps)}
    images = steps * job.plan.global_size

    def rate(run: Callable[[], float]) -> Callable[[], float]:
        return lambda: images / run()

    return interleave({name: rate(run) for name, run in runs.items()}, rounds=rounds)
