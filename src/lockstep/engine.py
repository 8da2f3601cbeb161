"""The training loop of `lockstep train`. Read this file first.

It is a loop over a `Session`, as a user's own is; in place of what `session.prepare` makes ready it has a `Job`, which
`assemble` makes of a config: data that are read by shares, a model, a `Strategy` that exchanges gradients, a
`Precision` that does the arithmetic. It never asks which strategy or launcher it has. The session shares the global
batch out, counts, records, saves and proves, and decides when. Whatever talks to other ranks is called by all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from . import losses, resume
from .config import RunConfig
from .files import shown
from .job import Job, assemble
from .loop import Loop
from .models.modes import evaluating
from .record.base import Recorder
from .result import RunResult
from .runs import Opened, opened
from .scoring import scored, tested
from .sessions import Session
from .state import State
from .trained import Trained
from .world import World

_PROBED = 8
"""Samples by which a loss of the user's is judged."""


def run(config: RunConfig, world: World) -> RunResult:
    """Train in a folder of its own: claim it, record, and leave a summary (*collective*)."""
    with opened(config, world) as ours:
        return train(ours.config, world, ours.recorder, state=ours.state)


def train(config: RunConfig, world: World, recorder: Recorder, *, state: State | None = None) -> RunResult:
    """Train as `config` says and return what came of it (*collective*).

    Checkpoints are written below `config.record.output` if that is set. The run continues from `state`, by default
    from the checkpoint that `config.checkpoint.resume` names. Raises `RequestError` for what cannot be honoured,
    `RunError` for a loss that is not finite or last weights that could not be written, `ProofError` for replicas that
    are not the same bits or an epoch that did not hold each sample once, and `Stopped` after Ctrl-C or SIGTERM, once
    saved.
    """
    loaded = state or resume.load(config, world)
    job = assemble(config, world, accumulation=None if loaded is None else resume.accumulation(loaded.meta, config))
    results: list[RunResult] = []

    def result(loop: Loop) -> dict[str, Any]:
        results.append(_result(job, session, loop, recorder))
        return results[0].as_json()

    try:
        held = Opened(config, recorder, loaded)
        trained = Trained(job, result)
        with Session(config, world, has_folder=config.record.output is not None, run=held, trained=trained) as session:
            session.begin(config.epochs)
            if ":" in config.optim.loss:
                world.together(lambda: _check_loss(job))
            job.strategy.settle(job.model, lambda: _rehearse(job))
            for epoch in session.epochs(config.epochs):
                for x, y in session.batches(trained):
                    train_share(job, session, x, y)
                if session.step == job.total_steps or (epoch + 1) % config.eval_every == 0:
                    _evaluate(job, session, recorder)
        world.pulse.enter("")  # not after an error: where it came is told
        return results[0]
    finally:
        job.data.close()


def train_share(job: Job, session: Session, x: Tensor, y: Tensor) -> None:
    """Compute this rank's share of a global micro-batch; after a batch's last, step (*collective*).

    The host waits for nothing.
    """
    pulse = job.world.pulse
    pulse.enter("forward")
    loss, logits = _loss(job, x, y)
    session.backward(loss, weight=session.samples, reduction="sum")
    if not session.is_last:
        return
    lr = job.lr(session.step)
    job.optimizer.set_lr(lr)
    pulse.enter("step")
    measure = session.loop.meter.ends_interval  # a norm costs more than some tiny steps
    norm = job.precision.step(job.optimizer.each, clip=job.config.optim.clip, measure=measure)
    job.optimizer.zero_grad()
    if job.average is not None:
        job.average.update()
    session.stepped(lr, norm, last=(logits.detach(), y))


def train_step(job: Job, count: int, shares: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Compute and exchange the gradients of one global batch of `count` samples, given by hand (*collective*).

    `shares` are this rank's (x, y) of each global micro-batch.
    """
    given = list(shares)
    for number, (x, y) in enumerate(given, start=1):
        with job.strategy.sync_on(job.replica, last=number == len(given)):
            loss, _ = _loss(job, x, y)
        job.precision.backward(loss, job.strategy.averages_over / count)


def _loss(job: Job, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over the samples x (n, …), y (n,), and the logits; n may be 0."""
    with job.precision.autocast():
        logits = job.replica(x)
        return job.loss_fn(logits, y, reduction="sum"), logits


def _evaluate(job: Job, session: Session, recorder: Recorder) -> None:
    """Score the weights on the set that `best` is chosen by (*collective*).

    What a stop cuts short is done again on resuming.
    """
    loop = session.loop
    samples = len(job.data.judged)
    recorder.record("evaluate", step=session.step, epoch=loop.progress.epochs, samples=samples)
    scores = scored(job, job.data.judged, stop=session.asked_to_stop, note=loop.proofs.note_evaluated)
    if scores is None:
        raise loop.stopped()
    loop.take(scores, on=job.data.best_on)


def _rehearse(job: Job) -> None:
    """Run the first micro-batch of the run forward and backward, as training does."""
    micros = job.micros(0)
    first = next(micros)
    train_step(job, first.total, [first.batch])
    micros.close()


def _check_loss(job: Job) -> None:
    """Raise `RequestError` where the user's own loss is no sum over the first samples of the run."""
    micros = job.micros(0)
    ((x, y),) = (micro.batch for micro in islice(micros, 1))
    with evaluating(job.model), torch.no_grad(), job.precision.autocast():
        losses.check_sum(job.config.optim.loss, job.loss_fn, job.model(x[:_PROBED]), y[:_PROBED])
    micros.close()


def _result(job: Job, session: Session, loop: Loop, recorder: Recorder) -> RunResult:
    """Return what the run has come to, with the scores on the test set (*collective*). Raises `Stopped`."""
    tests = tested(job, loop, recorder, stop=session.asked_to_stop)
    if tests is None:
        raise loop.stopped()
    progress, meter = loop.progress, loop.meter
    assert progress.scores is not None
    peak = meter.telemetry.peak_memory_bytes()
    peaks = job.world.sum(torch.tensor([peak["host"] or 0, peak["device"] or 0], device=job.world.device)).tolist()
    result = RunResult(
        top1=progress.scores.top1,
        top5=progress.scores.top5,
        loss=progress.scores.loss,
        best_top1=max(progress.best_top1, progress.scores.top1),
        best_on=job.data.best_on,
        test=tests["test"],
        test_best=tests.get("test_best"),
        stopped=progress.stalled(job.config.patience) if progress.step < job.total_steps else "",
        samples=progress.scores.samples,
        steps=progress.step,
        epoch_s=tuple(progress.epoch_s),
        proof=loop.checks(),
        output=shown(job.config.record.output),
    )
    if not meter.images:
        return result
    p50_s, p95_s = meter.clock.percentiles(50, 95)
    return dataclasses.replace(
        result,
        images_per_s=meter.images / meter.train_s,
        step_p50_s=p50_s,
        step_p95_s=p95_s,
        data_wait_s=meter.wait_s,
        peak_memory_bytes={"host": peaks[0], "device": peaks[1]},
    )
