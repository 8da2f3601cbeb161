"""Classification: loss and scores during training, and scores for `lockstep eval`."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import hardware, user_code
from ..checkpoint import resume
from ..config.schema import RunConfig
from ..data.share import Micro
from ..errors import RequestError, counted
from ..files import check_own, shown, write_whole
from ..models.modes import evaluating
from ..record.base import Nothing
from ..record.result import RunResult, Scores
from ..runs.folders import unwritable
from ..runs.opened import OpenRun
from ..sessions.session import Session
from ..training import losses, precision
from ..training.graphs import Graphs
from ..training.memory import OutOfMemoryError, no_loss
from ..world.world import World
from . import initial
from .evaluation import EvaluationShares, evaluate, stoppable
from .job import Job, assemble

if TYPE_CHECKING:
    from ..data.source import Source as Data

_PROBE_SAMPLES = 8  # for the check of a user's loss
_CONTRACT = 'it is called as loss(scores, labels, reduction="sum") and returns the sum over the samples, one number'


class Classifier:
    """Classification task of a job (see `trainer.Task`). Top-1 and top-5 are exact."""

    def __init__(self, job: Job, session: Session) -> None:
        """Check the user's loss (*collective*)."""
        job.facts = describe_job(job)
        self.batches: Iterable[Any] = session.prepare(job)
        self.optimizers, self.lr = job.optimizers, job.lr
        self._result: RunResult | None = None  # once the run has ended
        self._job, self._session = job, session
        self._scores: Scores | None = None  # of the last evaluation
        self._has_mean = ":" not in job.config.optim.loss  # a user's loss returns sums only
        session.on("end", self._summarize)
        if not self._has_mean:
            job.world.together(self._check_loss)

    def backward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the mean loss and its gradients; return (logits, labels) (*collective*).

        x is (n, …), y (n,), or (n, classes) of mixed samples, whose labels are those of the larger parts.
        """
        job, session, (x, y) = self._job, self._session, batch
        loss: Tensor | None = None
        labels = y.argmax(dim=1) if y.dim() == 2 else y
        logits = labels[:, None]
        with job.memory.watched():
            if not job.memory.has_run_out:
                total, logits = job.loss(x, y, reduction="mean" if self._has_mean else "sum")
                loss = total if self._has_mean else total / len(y)
        session.backward(no_loss(job.exchange.parameters) if loss is None else loss)
        if session.is_last:
            try:
                job.memory.check(job.world, job.plan)
            except OutOfMemoryError:
                session.abandon_batch()
                raise
        return logits.detach(), labels

    def _first_share(self) -> Micro:
        with contextlib.closing(self._job.micros(0)) as micros:
            return next(micros)

    def _check_loss(self) -> None:
        """Raise `RequestError` unless the user's loss sums over samples; probe the run's first samples."""
        job, name = self._job, f"--loss {self._job.config.optim.loss}"
        x, y = (part[:_PROBE_SAMPLES] for part in self._first_share().batch)
        with evaluating(job.model), job.precision.autocast():
            with torch.no_grad():
                logits, totals = job.model(x), [0.0, 0.0, 0.0]
            logits.requires_grad_()
            for number, part in enumerate((slice(None), slice(1), slice(1, None))):
                if len(y[part]):
                    try:  # on a copy: a loss may work in place
                        total = job.loss_fn(logits[part].clone(), y[part], reduction="sum")
                    except Exception as error:
                        raise RequestError(f"{name} {user_code.raised(error)}; {_CONTRACT}.") from error
                    losses.check_number(name, total, _CONTRACT)
                    totals[number] = float(total.detach())
        losses.check_sum(name, *totals, of=f"{len(y)} samples (scores {tuple(logits.shape)}, labels {tuple(y.shape)})")

    def evaluate(self) -> None:
        """Score the weights on the data set that chooses `best` (*collective*)."""
        data = self._job.data
        self._scores = scores = self._score(data.judged)
        self._session.score(scores.top1, on=data.best_on, **dataclasses.asdict(scores))

    def _score(self, data: Data) -> Scores:
        """Return the scores on a data set (*collective*). Raises `Stopped`."""
        return score_job(self._job, self._session, data, warn=self._session.warn)

    def _test(self, weights: str, step: int) -> dict[str, Any]:
        """Return the current weights' scores on the test set (*collective*). `weights` is `last` or `best`."""
        scores = dataclasses.asdict(self._score(self._job.data.test))
        self._session.log(**{f"test_{weights}_{name}": value for name, value in scores.items()})
        return {"step": step} | scores

    def _summarize(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the run's result with test scores (*collective*). Raises `Stopped`."""
        data, session = self._job.data, self._session
        if self._scores is None:  # a complete run was resumed
            self._scores = self._score(data.judged)
        scores = dataclasses.asdict(self._scores)
        test, best = {"step": summary["steps"]} | scores, None
        if data.validation is not None:
            test = best = self._test("last", summary["steps"])
            if not session.is_best:
                step = None if self._job.config.record.output is None else session.load_best()
                best = None if step is None else self._test("best", step)
        fields = {item.name for item in dataclasses.fields(RunResult)}
        self._result = RunResult(
            **{name: value for name, value in summary.items() if name in fields},
            **scores,
            images_per_s=summary["samples_per_s"],
            best_top1=max(session.best_score, self._scores.top1),
            best_on=data.best_on,
            test=test,
            test_best=best,
        )
        return self._result.as_json()

    @property
    def result(self) -> RunResult:
        """The run's result, once it has ended."""
        assert self._result is not None, "the session's loop has called `_summarize` at its end"
        return self._result


def describe_job(job: Job) -> dict[str, Any]:
    """Return the fields of a job in the `start` event."""
    data, initial_weights, device = job.data, job.initial_weights, job.world.device
    samples, best = counted(len(data.judged), "sample"), data.best_on
    if data.validation is None:
        lines = [f"best is chosen on the {best} ({samples}): there is no validation set; --holdout makes one"]
    else:
        sizes = f"training {job.samples:,}, test {len(data.test):,}, evaluated at the end"
        lines = [f"best is chosen on the {best} ({samples}; {sizes})"]
    if job.precision.name == "fp32" and precision.resolve("auto", device) == "bf16":
        units = "this GPU has bfloat16 units"
        if device.type == "cpu":
            units = f"this processor has bfloat16 units ({hardware.bf16_units()})"
        lines.append(
            f"{units}, which fp32 does not use: --precision bf16 may be faster; the results differ by rounding"
        )
    lines += data.cautions
    sources = [source for source in (data.train, data.validation, data.test) if source is not None]
    if files := list(dict.fromkeys(path for source in sources for path in source.skipped)):
        lines.append(f"skipped images that cannot be decoded: {len(files):,}, such as {', '.join(files[:3])}")
    described = initial_weights.lines() if initial_weights else ()
    return {
        "lines": [*lines, *described, *initial.describe_patterns(job.model, job.config)],
        "chosen": {
            "strategy": job.method.name,
            "channels-last": job.precision.channels_last and len(data.train.shape) == 3,  # of images alone
            "cuda-graphs": isinstance(job.replica, Graphs),
        },
        "best_on": best,
        "shape": list(data.train.shape),
        "classes": job.config.model.classes or data.train.classes,
        **({} if initial_weights is None else {"init": dataclasses.asdict(initial_weights)}),
    }


def score_job(job: Job, session: Session, data: Data, **options: Any) -> Scores:
    """Return `evaluate`'s scores of the job's model or average (*collective*). Raises `Stopped`."""
    size = job.config.batch.eval_batch or -(-job.plan.global_size // (job.replicas * job.plan.accumulation))
    shares = EvaluationShares(data, job.world, size)
    options |= {"autocast": job.precision.autocast, "loss_fn": losses.evaluated(job.config.optim, job.loss_fn)}
    return evaluate([*job.groups.values()][-1], stoppable(session, shares), job.world, **options)


def evaluate_checkpoint(
    config: RunConfig,
    world: World,
    *,
    split: str = "test",
    predictions: Path | None = None,
) -> dict[str, Any]:
    """Return the exact scores of the checkpoint in `config.checkpoint.resume` (*collective*).

    Writes each sample's prediction to the CSV file `predictions`. Raises `RequestError` for a split that the data lack.
    """
    loaded = resume.load(config, world, keys=resume.EVALUATED)
    assert loaded is not None, "the command names a checkpoint"
    # An evaluation splits no global batch; each rank takes this many samples at once.
    size = (config.batch.eval_batch or -(-config.batch.size // world.size)) * world.size
    batch = dataclasses.replace(config.batch, size=size, accumulate=None, micro_batch_asked=None, drop_last=False)
    data, record = dataclasses.replace(config.data, augment=()), dataclasses.replace(config.record, output=None)
    config = dataclasses.replace(config, batch=batch, data=data, record=record)
    job = assemble(config, world, evaluated=loaded)
    try:
        source: Data | None = getattr(job.data, split)
        if source is None:
            raise RequestError(
                f"--split validation: --data {config.data.name} has no validation set, and the run made none by "
                "--holdout; give --split test or --split train."
            )
        job.load_weights(loaded)
        rank_rows: list[Tensor] = []
        warnings = [*job.data.cautions]
        with Session(config, world, contextlib.nullcontext(OpenRun(config, Nothing(), None)), prepared=job) as session:
            scores = score_job(job, session, source, predictions=rank_rows, warn=warnings.append)
        empty = torch.empty(0, 4, dtype=torch.float64, device=world.device)
        rows = torch.cat(world.gather_variable_length(torch.cat(rank_rows or [empty]))).cpu().numpy()
        rows = rows[np.argsort(rows[:, 0])]
        assert np.array_equal(rows[:, 0], np.arange(len(source))), "not each sample once, in index order"
        report = {
            "checkpoint": shown(loaded.origin),
            "step": loaded.meta["step"],
            "split": split,
            **dataclasses.asdict(scores),
            "classes": _score_classes(rows, job.data.train.classes, job.data.names),
            "warnings": warnings,
            "covers": f"every number: each sample of the {split} set once, by all ranks",
        }
        numbers = getattr(source, "indices", rows[:, 0])  # indices in the whole data set, also for a subset
        if predictions is not None:
            world.together(lambda: _write(predictions, rows, numbers, source.files) if world.is_main else None)
        return report
    finally:
        job.data.close()


def _score_classes(rows: np.ndarray, classes: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return each class's samples and top1 (None without samples). Rows are (index, label, prediction, …)."""
    labels, is_hit = rows[:, 1].astype(np.int64), rows[:, 1] == rows[:, 2]
    samples, hits = (np.bincount(labels[chosen], minlength=classes).tolist() for chosen in (slice(None), is_hit))
    return [
        {"class": number, **({"name": names[number]} if number < len(names) else {}), "samples": count}
        | {"top1": hits[number] / count if count else None}
        for number, count in enumerate(samples)
    ]


def _write(predictions: Path, rows: np.ndarray, numbers: np.ndarray, files: tuple[str, np.ndarray] | None) -> None:
    """Write a CSV line per sample. `numbers` (n,) are the samples' indices in the whole set and in `files`."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("index", "label", "predicted", "probability", *(("file",) if files else ())))
    for number, (_, label, prediction, probability) in zip(numbers.tolist(), rows.tolist(), strict=True):
        file = (f"{files[0]}/{os.fsdecode(files[1][int(number)])}",) if files else ()
        lines.writerow((*map(int, (number, label, prediction)), repr(probability), *file))
    try:
        check_own(predictions)
        write_whole(predictions, os.fsencode(text.getvalue()))
    except OSError as error:
        raise unwritable(predictions, error) from error
