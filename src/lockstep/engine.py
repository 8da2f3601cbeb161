"""The training loop. Read this file first.

It is written with what a user has for a loop of their own: a `World` that says which ranks there are, a `BatchPlan`
that shares the global batch out, a `Strategy` that exchanges gradients, a `Precision` that does the arithmetic. It
never asks which strategy or launcher it has. One optimizer step is `train_step`; everything around it decides when
to read the metrics, evaluate, save and stop. Whatever talks to other ranks is called by all of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import resume
from .checkpoint import Checkpoints
from .config import RunConfig
from .errors import RunError, Stopped
from .evaluation import evaluate
from .interrupts import StopRequest
from .job import Batch, Job, assemble
from .meter import Meter, NonFiniteLossError
from .randomness import load_generators, save_generators
from .record.base import Recorder
from .record.files import write_json
from .result import RunResult, Scores
from .state import State, load_model, model_tensors
from .world import World


def train_step(job: Job, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute and exchange the gradients of one global batch (*collective*).

    Returns this rank's summed loss (0-dim, on the device) and the last micro-batch's (logits, labels).
    """
    # Normalised once, by the global count: the sum over micro-batches and ranks is then the gradient of the mean.
    weight = job.strategy.averages_over / batch.count
    total = None
    for x, y, last in batch.micros:
        with job.strategy.sync_on(job.replica, last=last), job.precision.autocast():
            logits = job.replica(x)
            loss = job.loss_fn(logits, y, reduction="sum")
        job.precision.backward(loss * weight)
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total, (logits.detach(), y)


@dataclass
class Progress:
    """How far a run has come: all of a checkpoint that is not tensors or random states."""

    step: int = 0
    epochs: int = 0
    """Whole epochs trained and evaluated."""
    epoch_s: list[float] = field(default_factory=list)
    partial_s: float = 0.0
    """Seconds of training in the epoch under way, before this process took it up."""
    best_top1: float = -1.0
    scores: Scores | None = None


def train(config: RunConfig, world: World, recorder: Recorder, *, state: State | None = None) -> RunResult:
    """Train as `config` says and return what came of it (*collective*).

    Checkpoints are written below `config.record.output` if that is set. The run continues from `state`, by default
    from the checkpoint that `config.checkpoint.resume` names. Raises `RequestError` for what cannot be
    honoured, `RunError` for a loss that is not finite, and `Stopped` after Ctrl-C or SIGTERM, once saved.
    """
    loaded = state or resume.load(config)
    job = assemble(config, world, accumulation=None if loaded is None else loaded.meta["accumulation"])
    progress = Progress() if loaded is None else _restore(job, loaded, config)
    job.strategy.settle(job.model, lambda: _rehearse(job))
    meter = Meter(world, recorder, log_every=config.record.log_every, total_steps=job.total_steps)
    _announce(job, progress, recorder)
    try:
        with StopRequest() as stop, _saver(config, world, recorder) as saver:
            while progress.step < job.total_steps or progress.epochs < progress.step // job.steps_per_epoch:
                _train_epoch(job, progress, meter, stop, saver)
                _evaluate_epoch(job, progress, meter, recorder, saver)
        if progress.scores is None:  # a run that was complete when it was taken up again
            progress.scores = _evaluate(job)
    except NonFiniteLossError as bad:
        raise _explain(bad, job) from bad
    finally:
        job.data.close()
    return _result(job, progress, meter, recorder)


def evaluate_checkpoint(config: RunConfig, world: World) -> Scores:
    """Return the exact scores of the checkpoint that `config.checkpoint.resume` names (*collective*)."""
    loaded = resume.load(config)
    assert loaded is not None, "the command names a checkpoint"
    job = assemble(config, world, accumulation=loaded.meta["accumulation"])
    try:
        _restore(job, loaded, config)
        return _evaluate(job)
    finally:
        job.data.close()


def _train_epoch(job: Job, progress: Progress, meter: Meter, stop: StopRequest, saver: _Saver) -> None:
    """Train from where `progress` is to the end of the epoch, or of the run."""
    epoch = progress.epochs
    first = progress.step - epoch * job.steps_per_epoch
    end = min((epoch + 1) * job.steps_per_epoch, job.total_steps)
    if progress.step >= end:
        return
    every = job.config.checkpoint.checkpoint_every
    clip = job.config.optim.clip
    train_s = meter.train_s - progress.partial_s
    batches = job.batches(epoch, first=first)
    read_s = 0.0
    meter.start()
    for batch in batches:
        lr = job.lr(progress.step)
        job.optimizer.set_lr(lr)
        loss, last = train_step(job, batch)
        norm = job.precision.step(job.optimizer.each, clip=clip)
        job.optimizer.zero_grad()
        if job.average is not None:
            job.average.update_parameters(job.model)
        progress.step += 1
        meter.add(progress.step, epoch, lr, batch.count, loss, norm)
        save = every is not None and progress.step % every == 0 and progress.step < end
        if progress.step == end or save or meter.due(stop.asked):
            stopping = meter.flush(stop=stop.asked, wait_s=batches.wait_s - read_s, last=last)
            read_s = batches.wait_s
            progress.partial_s = meter.train_s - train_s
            saver.poll()
            if save or stopping:
                saver.save(job, progress)
                meter.start()
            if stopping:
                saver.finish()
                raise Stopped(f"Stopped on request at step {progress.step} of {job.total_steps}{saver.advice()}")
        if progress.step == end:
            break
    if progress.step == (epoch + 1) * job.steps_per_epoch:
        progress.epoch_s.append(progress.partial_s)
        progress.partial_s = 0.0


def _evaluate_epoch(job: Job, progress: Progress, meter: Meter, recorder: Recorder, saver: _Saver) -> None:
    """Evaluate at the end of an epoch or of the run, and save."""
    scores = progress.scores = _evaluate(job)
    epoch = progress.epochs
    if progress.step == (epoch + 1) * job.steps_per_epoch:
        progress.epochs += 1
        recorder.record("epoch", step=progress.step, epoch=epoch, epoch_s=progress.epoch_s[-1])
    fields = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss, "samples": scores.samples}
    recorder.record("eval", step=progress.step, epoch=epoch, **fields)
    best = scores.top1 > progress.best_top1
    progress.best_top1 = max(progress.best_top1, scores.top1)
    saver.save(job, progress, best=best)


def _evaluate(job: Job) -> Scores:
    job.strategy.agree_on_buffers(job.model)
    if job.average is not None:
        job.strategy.agree_on_buffers(job.average.module)
    return evaluate(
        job.evaluated_model, job.data.test, job.world, batch=job.eval_batch, autocast=job.precision.autocast
    )


def _rehearse(job: Job) -> None:
    """Run one micro-batch of blanks forward and backward, as `train_step` does."""
    share = job.plan.split(0, job.plan.global_size, job.world.rank)[0]
    x = torch.zeros(len(share), *job.data.train.shape, dtype=job.precision.dtype, device=job.world.device)
    y = torch.zeros(len(share), dtype=torch.int64, device=job.world.device)
    train_step(job, Batch(job.plan.global_size, iter([(x, y, True)])))


class _Saver:
    """Saves the run's state in one format; on ranks other than 0 it takes part in the collectives alone."""

    def __init__(self, checkpoints: Checkpoints | None, *, to_disk: bool, folder: Path | None) -> None:
        self._checkpoints = checkpoints
        self._to_disk = to_disk
        self._folder = folder

    def save(self, job: Job, progress: Progress, *, best: bool = False) -> None:
        """Save in the background (*collective*)."""
        if not self._to_disk:
            return
        state = _state(job, progress)
        if self._checkpoints is not None:
            self._checkpoints.save(state, step=progress.step, best=best)

    def poll(self) -> None:
        """Tell how the save in the background ended, if it has."""
        if self._checkpoints is not None:
            self._checkpoints.poll()

    def finish(self) -> None:
        """Return once the last checkpoint is on the disk."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def advice(self) -> str:
        """Return how to go on, for the sentence that a stopped run ends with."""
        if self._folder is None:
            return "; nothing was saved, since no output folder was given."
        return f" and saved; continue with --resume {self._folder}."

    def __enter__(self) -> _Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()


def _saver(config: RunConfig, world: World, recorder: Recorder) -> _Saver:
    folder = config.record.output
    if folder is None or not world.is_main:
        return _Saver(None, to_disk=folder is not None, folder=folder)

    def saved(step: int, path: Path) -> None:
        recorder.record("checkpoint", step=step, path=str(path))

    def warn(text: str) -> None:
        recorder.record("warning", text=text)

    return _Saver(Checkpoints(folder / "checkpoints", warn=warn, saved=saved), to_disk=True, folder=folder)


def _state(job: Job, progress: Progress) -> State:
    """Return all that an exact continuation needs (*collective*)."""
    state = job.strategy.full_state(job.model, job.optimizer.each)
    tensors = dict(state.tensors)
    if job.average is not None:
        tensors |= model_tensors(job.average.module, under="ema")
        tensors["ema/n_averaged"] = job.average.n_averaged
    meta: dict[str, Any] = state.meta | {
        "step": progress.step,
        "epochs": progress.epochs,
        "epoch_s": progress.epoch_s,
        "partial_s": progress.partial_s,
        "best_top1": progress.best_top1,
        "accumulation": job.plan.accumulation,
        "ranks": job.world.size,
        "samples": job.samples,
        "scaler": job.precision.state(),
        "generators": save_generators(job.world),
        "config": resume.identity(job.config),
    }
    return State(tensors, meta)


def _restore(job: Job, loaded: State, config: RunConfig) -> Progress:
    """Put a loaded state into the job and return the progress it had."""
    meta = loaded.meta
    resume.check_samples(meta, job.samples, config)
    job.strategy.load_state(job.model, job.optimizer.each, loaded)
    if job.average is not None:
        averaged = loaded.part("ema")
        job.average.n_averaged.copy_(averaged.pop("n_averaged"))
        load_model(job.average.module, averaged)
    job.precision.load_state(meta["scaler"])
    load_generators(job.world, meta["generators"], config.seed, meta["step"])
    return Progress(
        step=meta["step"],
        epochs=meta["epochs"],
        epoch_s=list(meta["epoch_s"]),
        partial_s=meta["partial_s"],
        best_top1=meta["best_top1"],
    )


def _announce(job: Job, progress: Progress, recorder: Recorder) -> None:
    recorder.record(
        "start",
        lines=[str(job.plan), _said(job)],
        plan=dataclasses.asdict(job.plan),
        chosen=_chosen(job),
        output=str(job.config.record.output or ""),
        first_step=progress.step,
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
        "devices": job.world.size if parallel.devices is None else parallel.devices,
        "precision": job.precision.name,
        "channels-last": job.precision.channels_last,
        "batchnorm": job.batchnorm,
        "accumulate": job.plan.accumulation,
    }


def _said(job: Job) -> str:
    """Return the same in words, for the line that is printed once."""
    said = {
        "sync": "batch statistics of the global micro-batch",
        "local": "batch statistics of each replica: the model depends on how many there are",
        "none": "no batch statistics",
    }
    world = job.world
    order = "channels_last" if job.precision.channels_last else "contiguous"
    return (
        f"strategy {job.strategy.name}, launcher {job.config.parallel.launcher}, "
        f"{world.size} × {world.device.type}, precision {job.precision.name}, {order}; {said[job.batchnorm]}"
    )


def _explain(bad: NonFiniteLossError, job: Job) -> RunError:
    """Return the error for a loss that is not finite, after saving which samples this rank computed."""
    folder = job.config.record.output
    where = ""
    if folder is not None and job.world.rank in bad.ranks:
        (folder / "failures").mkdir(parents=True, exist_ok=True)
        indices = [part.tolist() for part in job.indices(bad.step - 1)]
        path = folder / "failures" / f"nonfinite_step_{bad.step}_rank_{job.world.rank}.json"
        write_json(path, {"step": bad.step, "rank": job.world.rank, "indices": indices})
    if folder is not None:
        where = f"; the batch's sample indices are in {folder / 'failures'}"
    ranks = " and ".join(f"rank {rank}" for rank in bad.ranks)
    return RunError(
        f"The loss at step {bad.step} is not a finite number on {ranks}{where}. "
        "Lower --lr, add --clip or --warmup, or use --precision fp32; the last checkpoint is from before."
    )


def _result(job: Job, progress: Progress, meter: Meter, recorder: Recorder) -> RunResult:
    assert progress.scores is not None
    peak = meter.telemetry.peak_memory_bytes()
    p50_s, p95_s = meter.clock.percentiles(50, 95)
    peaks = job.world.sum(torch.tensor([peak["host"] or 0, peak["device"] or 0], device=job.world.device)).tolist()
    result = RunResult(
        top1=progress.scores.top1,
        top5=progress.scores.top5,
        loss=progress.scores.loss,
        best_top1=max(progress.best_top1, progress.scores.top1),
        samples=progress.scores.samples,
        steps=progress.step,
        epoch_s=tuple(progress.epoch_s),
        images_per_s=meter.images / meter.train_s if meter.train_s else 0.0,
        step_p50_s=p50_s,
        step_p95_s=p95_s,
        data_wait_s=meter.wait_s,
        peak_memory_bytes={"host": peaks[0], "device": peaks[1]},
        output=str(job.config.record.output or ""),
    )
    recorder.record("finish", **result.as_json())
    return result
