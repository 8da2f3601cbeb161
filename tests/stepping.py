"""A job's training step by step, so that a test can look in between."""

from __future__ import annotations

from collections.abc import Generator

from lockstep.engine import train_share
from lockstep.job import Job
from lockstep.record.base import Nothing
from lockstep.runs import Opened
from lockstep.sessions import Session
from lockstep.trained import Trained


def steps(job: Job) -> Generator[None, None, None]:
    """Train as `lockstep train` does, without its scores; yield after each optimizer step, before its metrics."""
    trained = Trained(job, lambda loop: {})
    run = Opened(job.config, Nothing(), None)
    with Session(job.config, job.world, has_folder=False, run=run, trained=trained) as session:
        for _ in session.epochs(job.config.epochs):
            for x, y in session.batches(trained):
                train_share(job, session, x, y)
                if session.is_last:
                    yield
