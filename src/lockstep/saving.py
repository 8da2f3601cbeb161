"""Saving a run and taking it up again: between a `Job` with its `Progress` and the one `State` that a file holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from . import resume
from .checkpoint import Checkpoints, find, peek
from .errors import RequestError, counted
from .files import shown, understanding
from .folders import unwritable
from .job import Job
from .nn import sync_batchnorm
from .randomness import load_generators, save_generators
from .record.base import Recorder
from .result import Scores
from .state import State, load_model, model_tensors
from .verify import finite
from .world import World

_MEND = "mend what the warnings tell of"


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
    stale: int = 0
    """Evaluations since the best one."""
    scores: Scores | None = None
    """Of the last evaluation, which was at step `evaluated`."""
    evaluated: int = 0
    planned_epochs: int | None = None
    """Epochs that the run was to have when it was saved; None where it begins."""
    accumulation: int | None = None
    """Global micro-batches that a batch had when it was saved; None where it begins."""
    origin: Path | None = None
    """The checkpoint that it was taken up from."""
    caution: str = ""
    """What is to be said of that checkpoint."""

    def take(self, scores: Scores) -> None:
        """Take the scores of an evaluation at this step."""
        self.stale = 0 if scores.top1 > self.best_top1 else self.stale + 1
        self.best_top1 = max(self.best_top1, scores.top1)
        self.scores, self.evaluated = scores, self.step

    def stalled(self, patience: int | None) -> str:
        """Return in a clause that the evaluation at this step was the last that `patience` allows; "" if it was not."""
        if patience is None or self.stale < patience or self.evaluated != self.step:
            return ""
        return f"top1 has not improved in {counted(self.stale, 'evaluation')} (--patience {patience})"


class Saver:
    """Saves the run's state in one format; on ranks other than 0 it takes part in the collectives alone."""

    def __init__(self, folder: Path | None, world: World, recorder: Recorder, *, taken_up: State | None = None) -> None:
        """`folder` is the run's, None to save nothing; warnings and what was saved go to the recorder.

        `taken_up` is the checkpoint that the run goes on from, None where it begins.
        """
        self._taken_up_at: int | None = taken_up.meta["step"] if taken_up else None
        self._origin = taken_up.origin if taken_up else None
        self._folder = folder
        self._world = world
        self._recorder = recorder
        self._on_disk: int | None = None
        self._best_top1 = -math.inf
        """Of the checkpoint that `best` points to. A save may fail: the run's own best is no measure for it."""
        self._next_best_top1 = -math.inf
        self._checkpoints: Checkpoints | None = None
        if folder is not None:
            self._checkpoints = world.together(lambda: self._open(folder) if world.is_main else None)

    def _open(self, folder: Path) -> Checkpoints:
        try:
            checkpoints = Checkpoints(folder / "checkpoints", warn=self._warn, saved=self._saved, origin=self._origin)
        except OSError as error:
            raise unwritable(folder / "checkpoints", error) from error
        with understanding(checkpoints.folder):
            if self._taken_up_at is not None and (last := find(checkpoints.folder)) and (meta := peek(last)):
                self._on_disk = min(meta["step"], self._taken_up_at)
            best = peek(checkpoints.folder / "best")
            if best is not None and best["scores"] is not None and best["step"] <= (self._taken_up_at or 0):
                self._best_top1 = float(best["scores"]["top1"])
        return checkpoints

    def _warn(self, text: str) -> None:
        self._recorder.record("warning", text=text)

    def _saved(self, step: int, path: Path) -> None:
        self._on_disk = step
        self._best_top1 = self._next_best_top1
        self._recorder.record("checkpoint", step=step, path=str(path))

    def save(self, make: Callable[[], State], *, step: int, top1: float = -math.inf) -> None:
        """Save in the background what `make` returns (*collective*); `top1` of weights just evaluated may be best."""
        if self._folder is None:
            return
        with self._world.pulse.during("save"):
            state = make()
            if self._checkpoints is not None:
                self._checkpoints.wait()  # only then it is known what `best` points to
                best = top1 > self._best_top1
                self._next_best_top1 = max(top1, self._best_top1)
                self._checkpoints.save(state, step=step, best=best)

    def poll(self) -> None:
        """Tell how the save in the background ended, if it has."""
        if self._checkpoints is not None:
            self._checkpoints.poll()

    def finish(self, step: int) -> str:
        """Wait until what was saved is on the disk; return, on every rank, a clause that says so (*collective*)."""
        self._wait()
        on_disk = self._world.gather(self._on_disk)[0]
        if self._folder is None:
            return "; nothing was saved, since no output folder was given."
        again = f"continue with the same command and --resume {shown(self._folder)}"
        if on_disk == step:
            return f" and saved; {again}."
        last = "none before it was" if on_disk is None else f"the last one is of step {on_disk}: {_MEND} and {again}"
        return f", but its checkpoint could not be written; {last}."

    def conclude(self, make: Callable[[], State], *, step: int, top1: float = -math.inf) -> str:
        """Wait until the last save is on the disk; return, on every rank, a sentence where it is not (*collective*).

        A run that was complete when it was taken up is saved, as `save` does, only where it goes on in a folder of its
        own.
        """
        there = self._checkpoints is not None and find(self._checkpoints.folder) is not None
        nothing_done = step == self._taken_up_at
        if nothing_done and not self._world.gather(there)[0]:
            self.save(make, step=step, top1=top1)
        self._wait()
        is_there = self._checkpoints is None or self._on_disk == step or (nothing_done and there)
        told: str = self._world.gather("" if is_there else self._unsaved(step))[0]
        return told

    def _unsaved(self, step: int) -> str:
        newest, again = "there is no checkpoint", "start the same command again"
        if self._on_disk is not None:
            newest = f"the last one is of step {self._on_disk}"
            again = f"continue with the same command and --resume {shown(self._folder)}"
        return f"The weights of the last step, {step}, are not on the disk: {newest}; {_MEND} and {again}."

    def _wait(self) -> None:
        """Wait until what was saved is on the disk, or could not be written; the others wait for rank 0."""
        with self._world.pulse.during("save"):  # on every rank, since all enter the same phases
            if self._checkpoints is not None:
                self._checkpoints.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()


def _check_weights(job: Job, step: int) -> None:
    """Raise `RunError`, on every rank, where what is to be saved is not finite on any of them (*collective*).

    Of the buffers, BatchNorm's statistics alone are judged: others, such as a mask, may be infinite by intent.
    """
    judged: dict[str, Tensor] = {f"model/{name}": held for name, held in job.model.named_parameters()}
    judged |= {f"model/{name}": held for name, held in sync_batchnorm.statistics(job.model).items()}
    if job.average is not None:
        judged |= {f"ema/{name}": held for name, held in job.average.module.named_parameters()}
    if names := finite.found(job.world, judged):
        raise finite.error(step, names, remedy(job))


def remedy(job: Job) -> str:
    """Return what to do about numbers that are not finite, and where the run can be taken up again."""
    optim = job.config.optim
    ways = ["lower --lr"]
    ways += ["add --clip"] * (optim.clip is None) + ["add --warmup"] * (optim.warmup == 0)
    ways += ["use --precision fp32"] * (job.precision.name in ("bf16", "fp16", "tf32"))
    folder = job.config.record.output
    kept = "" if folder is None or find(folder) is None else f"; the last checkpoint in {shown(folder)} is from before"
    text = f"{', '.join(ways[:-1])} or {ways[-1]}" if len(ways) > 1 else ways[0]
    return f"{text[0].upper()}{text[1:]}{kept}."


def captured(job: Job, progress: Progress) -> State:
    """Return all that an exact continuation needs (*collective*). Raises `RunError` as `_check_weights` does."""
    _check_weights(job, progress.step)
    state = job.strategy.full_state(job.model, job.optimizer.each)
    tensors = dict(state.tensors)
    if job.average is not None:
        tensors |= model_tensors(job.average.module, under="ema")
    meta: dict[str, Any] = state.meta | {
        "step": progress.step,
        "epochs": progress.epochs,
        "epoch_s": progress.epoch_s,
        "partial_s": progress.partial_s,
        "best_top1": progress.best_top1,
        "stale": progress.stale,
        "scores": None if progress.scores is None else dataclasses.asdict(progress.scores),
        "evaluated": progress.evaluated,
        "planned_epochs": job.config.epochs,
        "batchnorm": job.batchnorm,
        "replicas": job.replicas,
        "accumulation": job.plan.accumulation,
        "ranks": job.world.size,
        "samples": job.samples,
        "scaler": job.precision.state(),
        "generators": save_generators(job.world, job.strategy.devices),
        "config": resume.identity(job.config),
    }
    return State(tensors, meta)


def restore(job: Job, loaded: State) -> Progress:
    """Put a loaded state into the job and return the progress it had."""
    meta = loaded.meta
    resume.check_samples(meta, job.samples, job.config)
    resume.check_batchnorm(meta, job.batchnorm, job.replicas)
    if meta["step"] > job.total_steps:
        raise RequestError(
            f"The checkpoint is of step {meta['step']}, and this run would end at step {job.total_steps}; give more "
            "--epochs or --max-steps, or start a new run in another --output."
        )
    if not 0 <= meta["step"] - meta["epochs"] * job.steps_per_epoch <= job.steps_per_epoch:
        raise RequestError(
            f"The checkpoint is of step {meta['step']}, which cannot come after {meta['epochs']} epochs of "
            f"{job.steps_per_epoch} steps; give another one."
        )
    with understanding(loaded.origin or Path("the checkpoint")):
        job.strategy.load_state(job.model, job.optimizer.each, loaded)
        if job.average is not None:
            load_model(job.average.module, loaded.part("ema"))
        job.precision.load_state(meta["scaler"])
        devices = job.strategy.devices
        load_generators(job.world, meta["generators"], job.config.seed, meta["step"], devices=devices)
        return Progress(
            step=meta["step"],
            epochs=meta["epochs"],
            epoch_s=list(meta["epoch_s"]),
            partial_s=meta["partial_s"],
            best_top1=meta["best_top1"],
            stale=meta.get("stale", 0),
            scores=None if meta["scores"] is None else Scores(**meta["scores"]),
            evaluated=meta["evaluated"],
            planned_epochs=meta["planned_epochs"],
            accumulation=meta["accumulation"],
            origin=loaded.origin,
            caution=loaded.caution,
        )


def restore_model(job: Job, loaded: State) -> None:
    """Put a loaded state's weights into the job's model, and into the averaged one, for evaluation alone."""
    with understanding(loaded.origin or Path("the checkpoint")):
        job.strategy.load_state(job.model, (), loaded)
        if job.average is not None:
            load_model(job.average.module, loaded.part("ema"))
