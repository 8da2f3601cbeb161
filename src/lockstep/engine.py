"""The training loop. Read this file first.

It is written with what a user has for a loop of their own: a `World` that says which ranks there are, a `BatchPlan`
that shares the global batch out, a `Strategy` that exchanges gradients, a `Precision` that does the arithmetic. It
never asks which strategy or launcher it has. `train_step` computes the gradients of a global batch, `advance` makes the
optimizer step that they serve; everything around them decides when to read the metrics, evaluate, save and stop.
Whatever talks to other ranks is called by all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import Tensor

from . import losses, resume
from .announce import announce
from .config import RunConfig
from .errors import RunError, Stopped, ranks_named
from .files import own_folder, shown, write_json
from .interrupts import StopRequest
from .job import Batch, Job, assemble
from .meter import Meter, NonFiniteLossError
from .models.modes import evaluating
from .proofs import Proofs
from .record.base import Recorder
from .result import RunResult
from .saving import Progress, Saver, captured, remedy, restore
from .scoring import Tests, scored, tested
from .state import State
from .world import World

_PROBED = 8
"""Samples by which a loss of the user's is judged."""


def train_step(job: Job, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute and exchange the gradients of one global batch (*collective*).

    Returns this rank's summed loss (0-dim, on the device) and the last micro-batch's (logits, labels).
    """
    # Normalised once, by the global count: the sum over micro-batches and ranks is then the gradient of the mean.
    weight = job.strategy.averages_over / batch.count
    pulse = job.world.pulse
    total = None
    for x, y, last in batch.micros:
        pulse.enter("forward")
        with job.strategy.sync_on(job.replica, last=last), job.precision.autocast():
            logits = job.replica(x)
            loss = job.loss_fn(logits, y, reduction="sum")
        pulse.enter("backward")
        job.precision.backward(loss, weight)
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    pulse.enter("")  # until it is called again, what happens is the caller's own code
    return total, (logits.detach(), y)


def advance(job: Job, step: int, batch: Batch, meter: Meter) -> tuple[Tensor, Tensor]:
    """Make optimizer step `step`, counted from 0, and note it in `meter`; the host waits for nothing (*collective*).

    Returns the last micro-batch's (logits, labels).
    """
    lr = job.lr(step)
    job.optimizer.set_lr(lr)
    loss, last = train_step(job, batch)
    job.world.pulse.enter("step")
    norm = job.precision.step(job.optimizer.each, clip=job.config.optim.clip)
    job.optimizer.zero_grad()
    if job.average is not None:
        job.average.update()
    meter.add(step + 1, step // job.steps_per_epoch, lr, batch.count, loss, norm)
    return last


def train(config: RunConfig, world: World, recorder: Recorder, *, state: State | None = None) -> RunResult:
    """Train as `config` says and return what came of it (*collective*).

    Checkpoints are written below `config.record.output` if that is set. The run continues from `state`, by default
    from the checkpoint that `config.checkpoint.resume` names. Raises `RequestError` for what cannot be honoured,
    `RunError` for a loss that is not finite or last weights that could not be written, `ProofError` for replicas that
    are not the same bits or an epoch that did not hold each sample once, and `Stopped` after Ctrl-C or SIGTERM, once
    saved.
    """
    # A download may take its time where nobody waits for it.
    world.pulse.enter("setup" if world.size > 1 else "")
    loaded = state or resume.load(config, world)
    job = assemble(config, world, accumulation=None if loaded is None else resume.accumulation(loaded.meta, config))
    try:
        progress = Progress() if loaded is None else restore(job, loaded)
        world.pulse.step = progress.step
        world.together(lambda: announce(job, progress, recorder))
        if ":" in config.optim.loss:
            world.together(lambda: _check_loss(job))
        job.strategy.settle(job.model, lambda: _rehearse(job))
        meter = _meter(job, recorder)
        with StopRequest(quiet=not world.is_main) as stop:
            with (
                _saver(config, world, recorder, loaded) as saver,  # which makes the folder, if nobody has
                Proofs(job, meter, recorder, step=progress.step) as proofs,
            ):
                try:
                    while not _is_over(job, progress):
                        _train_epoch(job, progress, meter, proofs, stop, saver)
                        _end_epoch(job, progress, recorder, proofs, stop, saver)
                except NonFiniteLossError as bad:
                    bad.doubt = proofs.explain_loss(progress.step, bad.step)
                    raise
                unsaved = _conclude(job, progress, saver)
                tests = tested(job, progress, recorder, proofs, stop=lambda: stop.asked)
                if tests is None:
                    raise _stopped(job, progress, saver)
            result = _result(job, progress, meter, proofs, recorder, tests)
        world.pulse.enter("")  # not after an error: where it came is told
        if unsaved:  # only now: what it came to is told and written all the same
            raise RunError(unsaved)
        return result
    except NonFiniteLossError as bad:
        raise _explain(bad, job) from bad
    finally:
        job.data.close()


def _meter(job: Job, recorder: Recorder) -> Meter:
    every, devices = job.config.record.log_every, job.strategy.devices
    return Meter(job.world, recorder, log_every=every, total_steps=job.total_steps, devices=devices)


def _saver(config: RunConfig, world: World, recorder: Recorder, loaded: State | None) -> Saver:
    return Saver(config.record.output, world, recorder, taken_up=loaded)


def _train_epoch(job: Job, progress: Progress, meter: Meter, proofs: Proofs, stop: StopRequest, saver: Saver) -> None:
    """Train from where `progress` is to the end of the epoch, or of the run."""
    epoch = progress.epochs
    first = progress.step - epoch * job.steps_per_epoch
    end = min((epoch + 1) * job.steps_per_epoch, job.total_steps)
    if progress.step >= end:
        return
    every = job.config.checkpoint.checkpoint_every
    train_s = meter.train_s - progress.partial_s
    batches = job.batches(epoch, first=first, note=proofs.note)
    read_s = 0.0
    meter.start()
    for batch in batches:
        last = advance(job, progress.step, batch, meter)
        progress.step += 1
        job.world.pulse.step = progress.step
        proofs.after_step(progress.step)
        save = every is not None and progress.step % every == 0 and progress.step < end
        if progress.step == end or save or meter.due(stop.asked):
            stopping = meter.flush(stop=stop.asked, wait_s=batches.wait_s - read_s, last=last)
            read_s = batches.wait_s
            progress.partial_s = meter.train_s - train_s
            saver.poll()
            proofs.keep(epoch)
            if save or stopping:
                proofs.before_save(progress.step)
                _save(job, progress, saver)
                meter.start()
            if stopping:
                raise _stopped(job, progress, saver)
        if progress.step == end:
            break


def _end_epoch(
    job: Job, progress: Progress, recorder: Recorder, proofs: Proofs, stop: StopRequest, saver: Saver
) -> None:
    """Evaluate where that is due at the end of an epoch or of the run, and save.

    What a stop cuts short is done again on resuming.
    """
    proofs.before_save(progress.step)
    epoch, scores = progress.epochs, None
    if progress.step == job.total_steps or (epoch + 1) % job.config.eval_every == 0:
        recorder.record("evaluate", step=progress.step, epoch=epoch, samples=len(job.data.judged))
        scores = scored(job, job.data.judged, stop=lambda: stop.asked, note=proofs.note_evaluated)
        if scores is None:
            _save(job, progress, saver)
            raise _stopped(job, progress, saver)
        progress.take(scores)
        proofs.end_evaluation(epoch, progress.step, scores.samples)
    if progress.step == (epoch + 1) * job.steps_per_epoch:
        proofs.end_epoch(epoch)
        progress.epochs += 1
        progress.epoch_s.append(progress.partial_s)
        progress.partial_s = 0.0
        recorder.record("epoch", step=progress.step, epoch=epoch, epoch_s=progress.epoch_s[-1])
    if scores is not None:
        fields = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "samples": scores.samples}
        recorder.record("eval", step=progress.step, epoch=epoch, on=job.data.best_on, **fields)
    saver.save(lambda: captured(job, progress), step=progress.step, top1=-1.0 if scores is None else scores.top1)


def _is_over(job: Job, progress: Progress) -> bool:
    """Whether no step is left to make, and the last weights are evaluated."""
    is_last = progress.step >= job.total_steps and progress.evaluated == progress.step
    return is_last or bool(progress.stalled(job.config.patience))


def _save(job: Job, progress: Progress, saver: Saver) -> None:
    saver.save(lambda: captured(job, progress), step=progress.step)


def _conclude(job: Job, progress: Progress, saver: Saver) -> str:
    top1 = progress.scores.top1 if progress.scores is not None else -1.0
    return saver.conclude(lambda: captured(job, progress), step=progress.step, top1=top1)


def _stopped(job: Job, progress: Progress, saver: Saver) -> Stopped:
    return Stopped(f"Stopped on request at step {progress.step} of {job.total_steps}{saver.finish(progress.step)}")


def _rehearse(job: Job) -> None:
    """Run the first micro-batch of the run forward and backward, as `train_step` does."""
    batches = job.batches(0)
    batch = next(iter(batches))
    x, y, _ = next(batch.micros)
    train_step(job, Batch(batch.count, iter([(x, y, True)])))
    batches.close()


def _check_loss(job: Job) -> None:
    """Raise `RequestError` where the user's own loss is no sum over the first samples of the run."""
    batches = job.batches(0)
    x, y, _ = next(next(iter(batches)).micros)
    with evaluating(job.model), torch.no_grad(), job.precision.autocast():
        losses.check_sum(job.config.optim.loss, job.loss_fn, job.model(x[:_PROBED]), y[:_PROBED])
    batches.close()


def _explain(bad: NonFiniteLossError, job: Job) -> RunError:
    """Return the error for a loss that is not finite, after saving which samples this rank computed."""
    folder = job.config.record.output
    where = ""
    if folder is not None and job.world.rank in bad.ranks:
        numbers = getattr(job.data.train, "indices", None)  # of a part, those of the whole set
        indices = [(part if numbers is None else numbers[part]).tolist() for part in job.indices(bad.step - 1)]
        path = folder / "failures" / f"nonfinite_step_{bad.step}_rank_{job.world.rank}.json"
        with contextlib.suppress(OSError):  # a full disk must not hide why the run failed
            own_folder(path.parent)
            write_json(path, {"step": bad.step, "rank": job.world.rank, "indices": indices})
    if folder is not None:
        where = f"; the batch's sample indices are in {shown(folder / 'failures')}"
    ranks = ranks_named(bad.ranks)
    return RunError(
        f"The loss at step {bad.step} is not a finite number on {ranks}{where}. {remedy(job)} {bad.doubt}".rstrip()
    )


def _result(
    job: Job,
    progress: Progress,
    meter: Meter,
    proofs: Proofs,
    recorder: Recorder,
    tests: Tests,
) -> RunResult:
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
        proof=proofs.checks(),
        output=shown(job.config.record.output),
    )
    if meter.images:
        p50_s, p95_s = meter.clock.percentiles(50, 95)
        result = dataclasses.replace(
            result,
            images_per_s=meter.images / meter.train_s,
            step_p50_s=p50_s,
            step_p95_s=p95_s,
            data_wait_s=meter.wait_s,
            peak_memory_bytes={"host": peaks[0], "device": peaks[1]},
        )
    recorder.record("finish", **result.as_json())
    return result
