"""Training loops to be timed in blocks of steps: ours, and ways to feed them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep import RunConfig, World, override, train
from lockstep.jobs.job import Job
from lockstep.record.base import Recorder
from lockstep.record.jsonl import JsonLines
from lockstep.training.optim import zero_grad


class Marks(Recorder):
    """A recorder that writes `steps.jsonl` and notes when the second interval and the last one had been recorded.

    The first two hold what happens once. The time between the second and the last holds all that the loop does for the
    steps after it, writing them down included.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._logged: list[tuple[int, float]] = []

    def record(self, event: str, **fields: Any) -> None:
        """Write the event, and note the time after an interval's last one."""
        self._lines.record(event, **fields)
        if event == "log":
            self._logged.append((fields["step"], time.perf_counter()))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        (first, begin_s), (last, end_s) = self._logged[1], self._logged[-1]
        return (end_s - begin_s) / (last - first)


def engine_step_s(config: RunConfig, path: Path, world: World | None = None) -> float:
    """Train as `config` says, recording to `path`, and return the mean seconds of a step, whatever comes between."""
    marks = Marks(path)
    try:
        train(config, world or World.alone(), marks)
    finally:
        marks.close()
    return marks.step_s


def configured(**values: Any) -> RunConfig:
    """Return a config with these options, by their public keys; a single process unless they say otherwise."""
    return override(RunConfig(), **{"strategy": "single", "epochs": 1000} | values)


Batch = list[tuple[Tensor, Tensor]]
"""This rank's share (x, y) of each global micro-batch of a global batch."""


def fed(job: Job) -> Iterator[Batch]:
    """Yield batches for ever, as the run would get them; an epoch's last, smaller one is left out."""
    for epoch in count():
        batch: Batch = []
        for micro in job.micros(epoch):
            batch.append(micro.batch)
            if micro.share.last:
                if micro.share.total == job.plan.global_size:
                    yield batch
                batch = []


def first_samples(job: Job) -> tuple[Tensor, Tensor]:
    """Return x and y of this rank's share of the first batch."""
    ((x, y),) = next(fed(job))  # one micro-batch
    return x, y


def repeated(job: Job) -> Iterator[Batch]:
    """Yield the first batch for ever: what a step costs without any work for its images."""
    share = first_samples(job)
    while True:
        yield [share]


def stepper(job: Job, batches: Iterator[Batch], *, steps: int) -> Callable[[], float]:
    """Return a function that trains `steps` steps and returns their seconds.

    These are the engine's own steps without its metrics; on a GPU its caller waits for the device.
    """
    size = job.plan.global_size

    def run() -> float:
        begin_s = time.perf_counter()
        for _ in range(steps):
            job.train_step(size, next(batches))
            job.precision.unscale(job.optimizers)
            for each in job.optimizers:
                job.precision.step_one(each, each.step)
                zero_grad(each)
            job.precision.update()
        return time.perf_counter() - begin_s

    return run
