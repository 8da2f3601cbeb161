"""The scores of a job's model on one of its sets: while it trains, and for `lockstep eval`, by class and by sample."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import resume
from ..checkpoint.state import State, load_model
from ..config.schema import RunConfig
from ..errors import RequestError
from ..files import check_own, own_folder, shown, understanding, write_json, write_whole
from ..models.modes import evaluating
from ..record.result import RunResult, Scores
from ..runs.folders import unwritable
from ..steps import report, start
from ..steps.evaluation import Predictions, evaluate
from ..steps.job import Job, assemble
from ..steps.progress import Progress
from ..training import losses
from ..world.world import World
from .session import Session

if TYPE_CHECKING:
    from ..data.source import Source as Data
    from ..data.source import Splits

SCORES = "scores.json"
_PROBED = 8
"""Samples by which a loss of the user's is judged."""
Shares = Iterable[tuple[Tensor, Tensor]]


class Classifier:
    """A job's task: a loss of scores and labels, and exact top-1 and top-5 (see `engine.Task`)."""

    def __init__(self, job: Job, session: Session, step: Callable[[Job, int, Shares], None]) -> None:
        """`step` is `engine.train_step`."""
        self.source, self.optimizer, self.lr, self.average = job, job.optimizer, job.lr, job.average
        self.result: RunResult | None = None
        """What the run has come to, once it has ended."""
        self._job, self._session, self._step = job, session, step

    def begin(self) -> None:
        """Begin the session's run, judge the user's loss, and rehearse a step (*collective*)."""
        job = self._job
        taken = [] if job.taken is None else job.taken.lines()
        facts = {
            "lines": [*report.lines(job), *taken, *start.reached(job.model, job.config)],
            "chosen": report.chosen(job),
            "eval_every": job.config.eval_every,
            "best_on": job.data.best_on,
            "shape": list(job.data.train.shape),
            "classes": job.config.model.classes or job.data.train.classes,
            **({} if job.taken is None else {"init": dataclasses.asdict(job.taken)}),
        }
        self._session.begin(job.config.epochs, facts, self._come_to, is_scored=True)
        if ":" in job.config.optim.loss:
            job.world.together(self._check_loss)
        job.strategy.settle(job.model, self._rehearse)

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        """Return the sum of the loss over the samples x (n, …), y (n,), and what it is of; n may be 0."""
        x, y = batch
        loss, logits = self._job.loss(x, y)
        return loss, None, (logits.detach(), y)

    def evaluate(self) -> None:
        """Score the weights on the set that `best` is chosen by (*collective*).

        What a stop cuts short is done again on resuming.
        """
        job, loop = self._job, self._session.loop
        judged, progress = job.data.judged, loop.progress
        loop.recorder.record("evaluate", step=progress.step, epoch=progress.epochs, samples=len(judged))
        loop.take(self._scored(judged), on=job.data.best_on)

    def _scored(self, source: Data) -> Scores:
        loop = self._session.loop
        scores = scored(self._job, source, stop=self._session.asked_to_stop, note=loop.proofs.note_evaluated)
        if scores is None:
            raise loop.stopped()
        return scores

    def _rehearse(self) -> None:
        """Run the first micro-batch of the run forward and backward, as training does."""
        with contextlib.closing(self._job.micros(0)) as micros:
            first = next(micros)
            self._step(self._job, first.total, [first.batch])

    def _check_loss(self) -> None:
        """Raise `RequestError` where the user's own loss is no sum over the first samples of the run."""
        job = self._job
        with contextlib.closing(job.micros(0)) as micros:
            x, y = next(micros).batch
            with evaluating(job.model), torch.no_grad(), job.precision.autocast():
                losses.check_sum(job.config.optim.loss, job.loss_fn, job.model(x[:_PROBED]), y[:_PROBED])

    def _come_to(self) -> dict[str, Any]:
        """Return what the run has come to, with the scores on the test set (*collective*). Raises `Stopped`."""
        job, loop = self._job, self._session.loop
        tests, progress, meter = self._tested(), loop.progress, loop.meter
        assert progress.scores is not None
        peak = meter.telemetry.peak_memory_bytes()
        own = torch.tensor([peak["host"] or 0, peak["device"] or 0], device=job.world.device)
        host, device = job.world.sum(own).tolist()
        result = RunResult(
            **dataclasses.asdict(progress.scores),
            best_top1=max(progress.best_top1, progress.scores.top1),
            best_on=job.data.best_on,
            test=tests["test"],
            test_best=tests.get("test_best"),
            stopped="" if loop.is_done else progress.stalled(job.config.patience),
            steps=progress.step,
            epoch_s=tuple(progress.epoch_s),
            proof=loop.checks(),
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
                peak_memory_bytes={"host": host, "device": device},
            )
        self.result = result
        return result.as_json()

    def _tested(self) -> dict[str, dict[str, Any] | None]:
        """Return the scores of the last weights on the test set, and those of the best if others (*collective*).

        The best ones are in the run's folder; the job's model has those afterwards.
        """
        job, progress = self._job, self._session.loop.progress
        if job.data.validation is None:
            assert progress.scores is not None
            return {"test": {"step": progress.step} | dataclasses.asdict(progress.scores)}
        last = best = self._test("last", progress.step)
        if progress.stale:
            best_state = best_of(job.config, job.world, progress)
            best = None
            if best_state is not None:
                restore_model(job, best_state)
                best = self._test("best", best_state.meta["step"])
        return {"test": last, "test_best": best}

    def _test(self, weights: str, step: int) -> dict[str, Any] | None:
        job, loop = self._job, self._session.loop
        now, data = loop.progress.step, job.data.test
        epoch = (now - 1) // job.steps()
        loop.recorder.record("evaluate", step=now, epoch=epoch, samples=len(data), of=weights)
        scores = self._scored(data)
        loop.proofs.end_evaluation(epoch, now, len(data))
        found = {"step": step} | dataclasses.asdict(scores)
        loop.recorder.record("test", of=weights, **found | {"step": now, "of_step": step})
        return found


def scored(
    job: Job,
    source: Data,
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


def restore_model(job: Job, loaded: State) -> None:
    """Put a loaded state's weights into the job's model, and into the averaged one, for evaluation alone."""
    with understanding(loaded.origin or Path("the checkpoint")):
        load_model(job.model, loaded.part("model"))
        if job.average is not None:
            load_model(job.average.module, loaded.part("ema"))


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


def _source(data: Splits, split: str, name: str) -> Data:
    found: Data | None = getattr(data, split)
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
