"""The scores of a job's model on one of its sets: while it trains, and for `lockstep eval`, by class and by sample."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import losses, resume
from .config import RunConfig
from .errors import RequestError
from .evaluation import Predictions, evaluate
from .files import check_own, own_folder, shown, write_json, write_whole
from .folders import unwritable
from .job import Job, assemble
from .loop import Loop
from .progress import Progress
from .record.base import Recorder
from .result import Scores
from .state import State
from .trained import restore_model
from .world import World

if TYPE_CHECKING:
    from .data.source import Source, Splits

SCORES = "scores.json"
Tests = dict[str, dict[str, Any] | None]
"""What a result has under `test` and `test_best`."""


def scored(
    job: Job,
    source: Source,
    *,
    stop: Callable[[], bool] = lambda: False,
    note: Callable[[np.ndarray], None] = lambda indices: None,
    predictions: Predictions | None = None,
) -> Scores | None:
    """Return the scores of the job's model, or of its average, on `source`; None once `stop()` holds (*collective*)."""
    job.strategy.agree_on_buffers(job.model)
    if job.average is not None:
        job.strategy.agree_on_buffers(job.average.module)
    return evaluate(
        job.evaluated_model,
        source,
        job.world,
        batch=job.eval_batch,
        autocast=job.precision.autocast,
        loss_fn=losses.evaluated(job.config.optim, job.loss_fn),
        stop=stop,
        note=note,
        predictions=predictions,
    )


def tested(job: Job, loop: Loop, recorder: Recorder, *, stop: Callable[[], bool]) -> Tests | None:
    """Return the scores of the last weights on the test set, beside a validation set of the best too (*collective*).

    The best ones are in the run's folder; the job's model has those afterwards. None once `stop()` holds.
    """
    progress, proofs = loop.progress, loop.proofs
    assert progress.scores is not None
    if job.data.validation is None:
        return {"test": {"step": progress.step} | dataclasses.asdict(progress.scores)}
    epoch, samples = (progress.step - 1) // job.steps_per_epoch, len(job.data.test)

    def test(weights: str, step: int) -> dict[str, Any] | None:
        recorder.record("evaluate", step=progress.step, epoch=epoch, samples=samples, of=weights)
        scores = scored(job, job.data.test, stop=stop, note=proofs.note_evaluated)
        if scores is None:
            return None
        proofs.end_evaluation(epoch, progress.step, samples)
        found = {"step": step} | dataclasses.asdict(scores)
        recorder.record("test", of=weights, **found | {"step": progress.step, "of_step": step})
        return found

    last = best = test("last", progress.step)
    if last is not None and progress.stale:
        best = None
        if (state := best_of(job.config, job.world, progress)) is not None:
            restore_model(job, state)
            last = last if (best := test("best", state.meta["step"])) else None
    return None if last is None else {"test": last, "test_best": best}


def best_of(config: RunConfig, world: World, progress: Progress) -> State | None:
    """Return the best weights' checkpoint; None where not every rank has it (*collective*)."""
    folder = config.record.output
    if folder is None:
        return None
    asked = dataclasses.replace(config.checkpoint, resume=str(folder / "checkpoints" / "best"))
    with contextlib.suppress(RequestError):
        state = resume.load(dataclasses.replace(config, checkpoint=asked), world)
        # A disk that was full may have left out the best.
        if state is not None and (state.meta["scores"] or {}).get("top1") == progress.best_top1:
            return state
    return None


def evaluate_checkpoint(
    config: RunConfig,
    world: World,
    *,
    split: str = "test",
    folder: Path | None = None,
    predictions: Path | None = None,
) -> dict[str, Any]:
    """Return the exact scores of the checkpoint that `config.checkpoint.resume` names (*collective*).

    They are written to `folder`/scores.json, and what the model says of each sample to the CSV file `predictions`.
    Raises `RequestError`, on every rank, for a split that there is not, and for files that cannot be written.
    """
    loaded = resume.load(config, world, keys=resume.EVALUATED)
    assert loaded is not None, "the command names a checkpoint"
    # An evaluation has no global batch that would have to be split; each rank takes this many samples at once.
    share = config.batch.eval_batch or -(-config.batch.size // world.size)
    batch = dataclasses.replace(
        config.batch, size=share * world.size, accumulate=None, micro_batch=None, drop_last=False
    )
    data = dataclasses.replace(config.data, augment=())
    config = dataclasses.replace(config, batch=batch, data=data)
    job = assemble(config, world, only_evaluates=True, weights=loaded.part("model"))
    try:
        source = _source(job.data, split, config.data.name)
        restore_model(job, loaded)
        each = Predictions()
        scores = scored(job, source, predictions=each)
        assert scores is not None, "nobody stops it"
        rows = each.gathered(world, len(source))
        told = {
            "checkpoint": shown(loaded.origin),
            "step": loaded.meta["step"],
            "split": split,
            **dataclasses.asdict(scores),
            "classes": _by_class(rows, job.data.train.classes, job.data.names),
            "covers": f"every number: each sample of the {split} set once, by all ranks",
        }
        numbers = getattr(source, "indices", rows[:, 0])  # of a part, those of the whole set
        world.together(lambda: _write(told, folder, rows, numbers, predictions) if world.is_main else None)
        return told
    finally:
        job.data.close()


def _source(data: Splits, split: str, name: str) -> Source:
    found: Source | None = getattr(data, split)
    if found is None:
        raise RequestError(
            f"--split validation: --data {name} has no validation set, and the run held none out (--holdout); give "
            "--split test or --split train."
        )
    return found


def _by_class(rows: np.ndarray, classes: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the samples and the top1 of each class, None of one without samples; `rows` are what was gathered."""
    labels, is_hit = rows[:, 1].astype(np.int64), rows[:, 1] == rows[:, 2]
    samples, hits = (np.bincount(labels[chosen], minlength=classes).tolist() for chosen in (slice(None), is_hit))
    return [
        {"class": number, **({"name": names[number]} if number < len(names) else {}), "samples": count}
        | {"top1": hits[number] / count if count else None}
        for number, count in enumerate(samples)
    ]


def _write(
    told: dict[str, Any], folder: Path | None, rows: np.ndarray, numbers: np.ndarray, predictions: Path | None
) -> None:
    target = predictions
    try:
        if predictions is not None:
            lines = (
                f"{number:.0f},{label:.0f},{predicted:.0f},{probability!r}\n"
                for number, (_, label, predicted, probability) in zip(numbers.tolist(), rows.tolist(), strict=True)
            )
            check_own(predictions)
            write_whole(predictions, ("index,label,predicted,probability\n" + "".join(lines)).encode())
        if folder is not None:
            target = folder / SCORES
            own_folder(folder)
            check_own(target)
            write_json(target, told)
    except OSError as error:
        raise unwritable(target, error) from error
