"""Whole trainings of each variant over several seeds: the accuracy they reach, and the time they take.

Each training is a command that runs alone on the machine. Seed by seed, A B C, then C B A, so that a machine that
becomes slower with time slows all variants alike. The seconds are those of training steps, as the records have them:
starts, evaluations and checkpoints are not in them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..runs import folders
from . import numbers, records, trials
from .grid import Cell, Words
from .numbers import Interval
from .rounds import Series
from .rows import Row
from .trials import Trial

Commands = Callable[[Cell, Path, int], Words]
Trained = Mapping[str, Mapping[int, Trial]]
"""Trainings by variant and seed; what the records of each tell is as in `records.training`."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What is trained: each variant once a seed, to its end or until an evaluation has this accuracy."""

    seeds: Sequence[int]
    to_accuracy: float | None = None

    def folder(self, series: Series, seed: int) -> Path:
        """Return the folder of a training: one to another accuracy is another training."""
        until = "" if self.to_accuracy is None else f"-to-{self.to_accuracy!r}"
        return series.folder / f"seed-{seed}{until}"


def run(
    found: Sequence[Series], command: Commands, aim: Aim, tell: Callable[[str], None]
) -> dict[str, dict[int, Trial]]:
    """Run the trainings that are not in their folders yet, one after the other, and return all.

    One that was begun goes on from its checkpoint.

    `command` returns the words of a cell's command with this run's folder and seed. A variant whose training fails is
    trained no more. Raises `Stopped` where a training was stopped by somebody else, and what `trials.run` does.
    """
    able = able_of(found)
    trained: dict[str, dict[int, Trial]] = {each.cell.name: {} for each in able}
    for number, seed in enumerate(aim.seeds):
        for place, each in enumerate(able[:: -1 if number % 2 else 1], start=1):
            name, mine, folder = each.cell.name, trained[each.cell.name], aim.folder(each, seed)
            if any(before.failed for before in mine.values()):
                continue
            training = trials.done(folder)
            if training is None or training.failed:
                tell(f"training {name}, seed {seed} ({number * len(able) + place} of {len(able) * len(aim.seeds)})")
                folders.check_free(folder / trials.RUN)  # a comparison that was killed may have left it training
                training = _train(name, folder, command(each.cell, folder / trials.RUN, seed), aim.to_accuracy)
            mine[seed] = training
    return trained


def able_of(found: Sequence[Series]) -> list[Series]:
    """Return the variants that can be trained whole: those that ran."""
    return [each for each in found if each.trial is not None and not each.failed]


def left(found: Sequence[Series], aim: Aim) -> tuple[int, float | None]:
    """Return how many trainings are to be made yet, and the seconds that their starts and steps take at most.

    By the steps of the variants' trials; None where a loop does not tell how many steps it has.
    """
    todo = [each for each in able_of(found) for seed in aim.seeds if trials.done(aim.folder(each, seed)) is None]
    steps = [_steps(each) for each in todo]
    if not all(steps):
        return len(todo), None
    tried = [each.trial for each in todo if each.trial is not None]
    each_s = [
        (trial.to_first_step_s or 0.0) + many * statistics.median(trial.step_s)
        for trial, many in zip(tried, steps, strict=True)
    ]
    return len(todo), sum(each_s)


def _steps(series: Series) -> int:
    """Return how many steps a whole training has; 0 where nobody knows."""
    start, config = series.start, series.cell.config
    if config is None or not config.data.name:  # a script, which decides on its epochs
        return int(start["total_steps"])
    steps = int(start["steps_per_epoch"]) * config.epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)


def _train(name: str, folder: Path, words: Words, target: float | None) -> Trial:
    path = folder / trials.RUN / records.FILE
    enough = None if target is None else records.reaching(path, target)
    return trials.run(name, folder, words, told=lambda: records.training(path, target), enough=enough)


def row(known: Row, mine: Mapping[int, Trial], target: float | None) -> Row:
    """Return the row with what its trainings tell."""
    told = [each.told for each in mine.values() if not each.failed]
    ends = [each["evals"][-1] for each in told if each["evals"]]
    reached = [each["evals"][-1] for each in told if each["reached"]]
    trouble = [f"training with seed {seed} failed: {each.failed}" for seed, each in mine.items() if each.failed]
    return replace(
        known,
        failed=known.failed or "".join(trouble[:1]),
        seeds=len(told),
        proved="; ".join(dict.fromkeys(each["proved"] for each in told if each.get("proved"))) or known.proved,
        accuracy=numbers.spread([top1 for *_, top1 in ends]),
        trained_s=numbers.spread([each["train_s"] for each in told]),
        trained_epoch_s=numbers.spread([statistics.fmean(each["epoch_s"]) for each in told if each["epoch_s"]]),
        reached=None if target is None else len(reached),
        to_accuracy_steps=numbers.spread([step for step, *_ in reached]),
        to_accuracy_s=numbers.spread([seconds for _, seconds, _ in reached]),
    )


def difference(ours: Mapping[int, Trial], theirs: Mapping[int, Trial], at: int, *, reached: bool = False) -> Interval:
    """Return the mean difference of two variants over the seeds that both have: `at` 1 of seconds, 2 of accuracy.

    With `reached`, over the seeds for which both reached the accuracy.
    """
    ends = [
        {seed: each.told["evals"][-1][at] for seed, each in trained.items() if _counts(each, reached)}
        for trained in (ours, theirs)
    ]
    return numbers.paired([(value, ends[1][seed]) for seed, value in ends[0].items() if seed in ends[1]])


def _counts(training: Trial, reached: bool) -> bool:
    return not training.failed and bool(training.told["reached"] if reached else training.told["evals"])


def best(mine: Mapping[int, Trial]) -> float | None:
    """Return the highest accuracy of all evaluations; None where there is none."""
    return max((top1 for each in mine.values() for *_, top1 in each.told.get("evals", [])), default=None)


def curve(mine: Mapping[int, Trial]) -> list[tuple[float, float]]:
    """Return (seconds of training, accuracy) of each evaluation that all seeds have, their means."""
    seeds = [each.told["evals"] for each in mine.values() if not each.failed]
    return [
        (statistics.fmean(seconds for _, seconds, _ in same), statistics.fmean(top1 for *_, top1 in same))
        for same in zip(*seeds, strict=False)
    ]
