"""Saving a run and taking it up again: between a `Job` with its `Progress` and the one `State` that a file holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import resume
from .checkpoint import Checkpoints
from .config import RunConfig
from .errors import RunError
from .job import Job
from .randomness import load_generators, save_generators
from .record.base import Recorder
from .result import Scores
from .state import State, load_model, model_tensors
from .world import World


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


class Saver:
    """Saves the run's state in one format; on ranks other than 0 it takes part in the collectives alone."""

    def __init__(self, checkpoints: Checkpoints | None, *, to_disk: bool, folder: Path | None) -> None:
        self._checkpoints = checkpoints
        self._to_disk = to_disk
        self._folder = folder

    @classmethod
    def of(cls, config: RunConfig, world: World, recorder: Recorder) -> Saver:
        """Return the saver of a run: it writes below `config.record.output`, on rank 0, or nowhere without one."""
        folder = config.record.output
        if folder is None or not world.is_main:
            return cls(None, to_disk=folder is not None, folder=folder)

        def saved(step: int, path: Path) -> None:
            recorder.record("checkpoint", step=step, path=str(path))

        def warn(text: str) -> None:
            recorder.record("warning", text=text)

        return cls(Checkpoints(folder / "checkpoints", warn=warn, saved=saved), to_disk=True, folder=folder)

    def save(self, job: Job, progress: Progress, *, best: bool = False) -> None:
        """Save in the background (*collective*)."""
        if not self._to_disk:
            return
        _check_weights(job, progress.step)
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
        return f" and saved; continue with the same command and --resume {self._folder}."

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()


def _check_weights(job: Job, step: int) -> None:
    """Raise `RunError` where the weights are not finite: a loss can be finite and its gradients not."""
    parameters: list[torch.Tensor] = list(job.model.parameters())
    if not bool(torch.stack(torch._foreach_norm(parameters)).isfinite().all()):
        bad = [name for name, item in job.model.named_parameters() if not bool(item.isfinite().all())]
        raise RunError(
            f"The weights after step {step} are not finite numbers ({', '.join(bad[:3])}), though the loss was; they "
            "were not saved. Lower --lr, add --clip or --warmup, or use --precision fp32; the last checkpoint is good."
        )


def _state(job: Job, progress: Progress) -> State:
    """Return all that an exact continuation needs (*collective*)."""
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
        "accumulation": job.plan.accumulation,
        "ranks": job.world.size,
        "samples": job.samples,
        "scaler": job.precision.state(),
        "generators": save_generators(job.world),
        "config": resume.identity(job.config),
    }
    return State(tensors, meta)


def restore(job: Job, loaded: State) -> Progress:
    """Put a loaded state into the job and return the progress it had."""
    meta = loaded.meta
    resume.check_samples(meta, job.samples, job.config)
    job.strategy.load_state(job.model, job.optimizer.each, loaded)
    if job.average is not None:
        load_model(job.average.module, loaded.part("ema"))
    job.precision.load_state(meta["scaler"])
    load_generators(job.world, meta["generators"], job.config.seed, meta["step"])
    return Progress(
        step=meta["step"],
        epochs=meta["epochs"],
        epoch_s=list(meta["epoch_s"]),
        partial_s=meta["partial_s"],
        best_top1=meta["best_top1"],
    )
