"""What a run says of itself when it starts: the batch plan, and what each `auto` came to."""

from __future__ import annotations

import dataclasses
from typing import Any

from .job import Job
from .record.base import Recorder


def announce(job: Job, first_step: int, recorder: Recorder) -> None:
    recorder.record(
        "start",
        lines=[str(job.plan), *_said(job), *_skipped(job)],
        plan=dataclasses.asdict(job.plan),
        chosen=_chosen(job),
        output=str(job.config.record.output or ""),
        first_step=first_step,
        total_steps=job.total_steps,
        steps_per_epoch=job.steps_per_epoch,
        epochs=job.config.epochs,
    )


def _chosen(job: Job) -> dict[str, Any]:
    """Return what each `auto` came to, by option."""
    parallel = job.config.parallel
    return {
        "strategy": job.strategy.name,
        "launcher": parallel.launcher,
        "accelerator": job.world.device.type,
        "devices": job.replicas,
        "precision": job.precision.name,
        "channels-last": job.precision.channels_last,
        "batchnorm": job.batchnorm,
        "accumulate": job.plan.accumulation,
    }


def _skipped(job: Job) -> list[str]:
    """Return a line for images that were left out, on request, because they cannot be decoded."""
    files = [*job.data.train.skipped, *job.data.test.skipped]
    return [f"{len(files)} images that cannot be decoded are left out: {', '.join(files[:3])}"] if files else []


def _said(job: Job) -> list[str]:
    """Return what was chosen in words, for the lines that are printed once."""
    statistics = {
        "sync": "batch statistics of the global micro-batch",
        "local": "batch statistics of each replica: the model depends on how many there are",
        "none": "no batch statistics",
    }[job.batchnorm]
    parallel, device = job.config.parallel, job.world.device.type
    order = "channels_last" if job.precision.channels_last else "contiguous"
    return [
        f"strategy {job.strategy.name}, launcher {parallel.launcher}, {job.replicas} × {device}, "
        f"precision {job.precision.name}, {order}",
        statistics,
    ]
