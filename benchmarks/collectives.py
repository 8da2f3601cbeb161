"""Collectives of the ranks of one host: shared memory against gloo, and two ranks against one process of two threads.

The ranks take turns at a sum by gloo and one through shared memory. Then two ranks of one thread each train with
synchronised BatchNorm, in turns with their rank 0 alone, which has two threads and the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import RunConfig, World, launch
from lockstep.config.options import override, recipe
from lockstep.jobs.job import assemble

from .harness import Report, Series, interleave
from .loops import configured, repeated, stepper

SIZES = {"256 B": (256, 400, 1 / 30), "4 MB": (4 << 20, 20, 1 / 2), "100 MB": (100 << 20, 2, 1 / 2)}
"""Bytes, repetitions a round, and the part of gloo's time to reach on two ranks."""
RANKS = (2, 3, 4)
ROUNDS = 12
TRAININGS: dict[str, tuple[dict[str, Any], int, float]] = {
    "digits, batch 64": ({"batch": 64}, 30, 0.85),
    "digits, batch 512": ({"batch": 512}, 10, 1.1),
    "ResNet-18, batch 128": ({"model": "resnet18", "data": "fake", "image_size": 32, "batch": 128}, 1, 1.0),
    "PyramidNet α48, batch 128": (
        {"model": "pyramidnet-110-48", "data": "fake", "image_size": 32, "batch": 128},
        1,
        1.1,
    ),
}
"""Options over the recipe digits, steps a round, and the quotient of images/s to reach."""


def measure() -> Report:
    """Return what part of gloo's time a sum takes, and what two ranks train for each image of one process."""
    rows: list[tuple[str, ...]] = []
    met: list[bool] = []
    for ranks in RANKS:
        found = launch(_sums, configured(strategy="ddp", devices=ranks, accelerator="cpu"))
        assert found is not None
        for size, (_, _, goal) in SIZES.items():
            gloo, ours = (Series(tuple(found[size][name])) for name in ("gloo", "shared memory"))
            part = ours.per(gloo)
            reach = goal if ranks == 2 else 1.0
            met.append(part.median <= reach)
            rows.append(
                (
                    f"sum of {size}, {ranks} ranks",
                    f"{1e3 * gloo.median:.3f} ms",
                    f"{1e3 * ours.median:.3f} ms",
                    f"1/{1 / part.median:.1f} of the time",
                    f"1/{1 / reach:.0f}",
                )
            )
    for name, (_, _, goal) in TRAININGS.items():
        speeds = launch(partial(_trainings, name), configured(strategy="ddp", devices=2, accelerator="cpu"))
        assert speeds is not None
        one, two = (Series(tuple(speeds[subject])) for subject in ("one", "two"))
        quotient = two.per(one)
        met.append(quotient.median >= goal)
        rows.append(
            (name, f"{one.median:.0f} images/s", f"{two.median:.0f} images/s", f"× {quotient.text()}", f"{goal}")
        )
    return Report(
        title="Ranks of one host",
        finding=f"Shared memory against gloo, and two ranks against one process: {sum(met)} of {len(met)} goals met.",
        columns=("what", "gloo, or one process of 2 threads", "shared memory, or 2 ranks of 1", "quotient", "goal"),
        rows=rows,
        method="Sums of float32, in turns in the same ranks; the slowest rank's time. Training in float32 with "
        "synchronised BatchNorm and channels_last, forward and backward pass and optimizer step.",
        n=f"{ROUNDS} rounds",
    )


def _sums(config: RunConfig, world: World) -> dict[str, dict[str, list[float]]]:
    torch.set_num_threads(1)
    found = {}
    for size, (count, repetitions, _) in SIZES.items():
        tensor = torch.ones(count // 4)
        ways: dict[str, Callable[[Tensor], Any]] = {
            "gloo": lambda tensor: dist.all_reduce(tensor, group=world.group),
            "shared memory": world.sum_,
        }
        assert world.memory is not None, world.shared_memory_reason
        subjects = {name: _slowest(world, way, tensor, repetitions) for name, way in ways.items()}
        found[size] = {name: list(one.values) for name, one in interleave(subjects, rounds=ROUNDS).items()}
    return found


def _slowest(world: World, exchange: Callable[[Tensor], Any], tensor: Tensor, repetitions: int) -> Callable[[], float]:
    def measured() -> float:
        tensor.fill_(1)
        world.barrier()
        begin_s = time.perf_counter()
        for _ in range(repetitions):
            exchange(tensor)
            tensor.fill_(1)
        return float(world.max(torch.tensor((time.perf_counter() - begin_s) / repetitions, dtype=torch.float64)))

    return measured


def _trainings(name: str, config: RunConfig, world: World) -> dict[str, list[float]]:
    options, steps, _ = TRAININGS[name]
    options = options | {"ledger": False, "channels_last": "on"}
    batch = int(options["batch"])
    alone = assemble(override(recipe("digits"), **options, strategy="single"), World.alone())
    shared = assemble(override(recipe("digits"), **options, strategy="ddp", batchnorm="sync"), world)
    one, two = stepper(alone, repeated(alone), steps=steps), stepper(shared, repeated(shared), steps=steps)

    def by_one() -> float:
        torch.set_num_threads(world.size)
        world.barrier()
        seconds = one() if world.is_main else 0.0
        world.barrier()
        return batch * steps / seconds if seconds else 0.0

    def by_two() -> float:
        torch.set_num_threads(1)
        world.barrier()
        return batch * steps / float(world.max(torch.tensor(two(), dtype=torch.float64)))

    series = interleave({"one": by_one, "two": by_two}, rounds=ROUNDS)
    return {name: list(one.values) for name, one in series.items()}
