"""A job's training step by step, so that a test can look in between."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext

from lockstep.jobs.classifier import Classifier
from lockstep.jobs.job import Job
from lockstep.record.base import Nothing
from lockstep.runs.opened import OpenRun
from lockstep.sessions.session import Session
from lockstep.trainer import train_share


def steps(job: Job) -> Generator[None, None, None]:
    """Train as `lockstep train` does, without its scores; yield after each optimizer step, before its metrics."""
    run = nullcontext(OpenRun(job.config, Nothing(), None))
    with Session(job.config, job.world, run, prepared=job) as session:
        task = Classifier(job, session)
        for _ in session.epochs(job.config.epochs):
            for batch in task.batches:
                train_share(task, session, batch, job.config.optim.clip)
                if session.is_last:
                    yield
