"""Whether the checkpoints of a run are whole, of the steps that they stand for, and of this run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .. import checkpoint, resume
from ..errors import RequestError, counted
from ..proof import BIT_FOR_BIT, Check
from ..state import State
from ..verify import finite
from .claim import Claim
from .on_disk import CONFIG, SCORES, STEPS, SUMMARY, Records, Row, is_finite

_CHECKPOINTS = Claim(
    "checkpoints",
    "The checkpoints last and best are whole, finite, of this run, and of the steps they stand for",
    BIT_FOR_BIT,
)
_SAVED = Claim("checkpoints", "The checkpoints that were saved are whole, and of finite numbers", BIT_FOR_BIT)


def checkpoints(run: Records) -> Check:
    """Judge the checkpoints `last` and `best`; reads them whole."""
    if why := run.lacking(STEPS):
        return _CHECKPOINTS.open(why)
    folder = run.folder / "checkpoints"
    saved = {row["step"] for row in run.rows("checkpoint")}
    if not saved and run.unfinished and not (folder / "last").exists():
        return _CHECKPOINTS.open(f"none was written: {run.unfinished}")
    # `best` may point to what an evaluation gave that is on the disk: a full one leaves out a checkpoint.
    best = _best(run, saved | {part.first_step for part in run.parts})
    problems: list[str] = []
    read: dict[str, State] = {}
    for name in ("last", "best") if best is not None or run.exit == 0 else ("last",):
        try:
            read[name] = checkpoint.load(folder / name)
        except RequestError as error:
            problems.append(str(error).partition(";")[0].rstrip("."))  # without what to resume from instead
    for name, state in read.items():
        problems += [f"{name}: {text}" for text in (*_of_another_run(state.meta, run), *_not_finite(state))]
    if len(sizes := {state.meta.get("samples") for state in read.values()}) > 1:
        problems.append(f"last and best were trained on {' and '.join(map(str, sizes))} samples")
    if "last" in read:
        problems += [f"last: {text}" for text in _not_last(read["last"].meta, run, saved)]
    if "best" in read and best is not None:
        problems += [f"best: {text}" for text in _not_best(read["best"].meta, run, best)]
    tensors = sum(len(state.tensors) for state in read.values())
    steps = ", ".join(f"{name} of step {state.meta.get('step')}" for name, state in read.items())
    return _CHECKPOINTS.judged(problems, times=len(read), found=f"{steps}; {counted(tensors, 'tensor')}")


def saved(run: Records) -> Check:
    """Judge the checkpoints of a loop of the user's own, of whose scores the records tell nothing; reads them whole."""
    folder = run.folder / "checkpoints"
    told = max((row["step"] for row in run.rows("checkpoint")), default=None)
    names = [name for name in ("last", "best") if os.path.lexists(folder / name)]
    if told is None and not names:
        return _SAVED.open(f"none was written: {run.unfinished or 'nothing was saved'}")
    problems = [] if "last" in names else [f"last is not there, and the records tell of a checkpoint of step {told}"]
    for name in names:
        try:
            state = checkpoint.load(folder / name)
        except RequestError as error:
            problems.append(str(error).partition(";")[0].rstrip("."))
            continue
        problems += [f"{name}: {text}" for text in _not_finite(state)]
        if name == "last" and told is not None and state.meta["step"] < told:
            problems.append(f"last: it is of step {state.meta['step']}, and one of step {told} was written")
    return _SAVED.judged(problems, times=len(names))


def _best(run: Records, on_disk: set[int]) -> Row | None:
    rows = [row for row in run.rows("eval") if row["step"] in on_disk and is_finite(row["top1"])]
    return max(rows, key=lambda row: float(row["top1"]), default=None)


def _of_another_run(meta: Mapping[str, Any], run: Records) -> Iterator[str]:
    """Yield the options in which the checkpoint is not of the run's config."""
    if run.config is None:
        return  # which is what the claim about the files says
    saved = meta.get("config", {})
    for name, value in resume.identity(run.config).items():
        # An option that is newer than the checkpoint cannot have been another one.
        if saved.get(name, value) != value:
            yield f"it was trained with {name} {saved[name]}, and {CONFIG} has {value}"


def _not_finite(state: State) -> Iterator[str]:
    """Yield the weights and statistics that are not finite; what else a model holds, such as a mask, may be."""
    trained = {name.rpartition("/")[0] for name in state.part("optimizer")}
    judged: dict[str, Tensor] = {}
    for group in ("model", "ema"):
        for name, held in state.part(group).items():
            # An optimizer without a state of its own does not tell which are weights.
            if not trained or name in trained or name.endswith(("running_mean", "running_var")):
                judged[f"{group}/{name}"] = held
    if names := finite.not_finite(judged):
        yield f"{', '.join(names[: finite.NAMED])} {'is' if len(names) == 1 else 'are'} not finite"


def _not_last(meta: Mapping[str, Any], run: Records, saved: set[int]) -> Iterator[str]:
    """Yield why this is not the newest state that the records tell of."""
    step, least = meta.get("step"), max(saved, default=0)
    if run.exit == 0 and step != run.last_step:
        yield f"it is of step {step}, and the run of {run.last_step}"
    elif run.exit != 0 and not least <= (step or 0) <= run.last_step:
        yield f"it is of step {step}; the records go to {run.last_step}, and tell of a checkpoint of step {least}"
    if step == run.last_step:
        yield from _of_other_scores(meta, run)
    if run.exit == 0 and run.summary is not None and meta.get("best_top1") != (told := run.summary.get("best_top1")):
        yield f"its best_top1 is {meta.get('best_top1')}, and {SUMMARY} has {told}"


def _not_best(meta: Mapping[str, Any], run: Records, best: Row) -> Iterator[str]:
    """Yield why this is not the checkpoint of the best evaluation."""
    scores = {row["step"]: row["top1"] for row in run.rows("eval")}
    step = meta.get("step")
    if step not in scores:
        yield f"it is of step {step}, of which {STEPS} has no evaluation"
    elif scores[step] != best["top1"]:
        yield f"it is of step {step} with top1 {scores[step]}, and step {best['step']} had {best['top1']} ({best.at})"
    yield from _of_other_scores(meta, run)


def _of_other_scores(meta: Mapping[str, Any], run: Records) -> Iterator[str]:
    """Yield where the scores in the checkpoint are not those recorded for the step that was evaluated."""
    rows = [row for row in run.rows("eval") if row["step"] == meta.get("evaluated")]
    told = meta.get("scores")
    if rows and isinstance(told, dict):
        row = rows[-1]
        for name in SCORES:
            if told.get(name) != row[name]:
                yield f"its {name} is {told.get(name)}, and step {row['step']} had {row[name]} ({row.at})"
