"""Whole trainings of each variant over several seeds: the accuracy they reach, and the time they take.

Each training is a command that runs alone on the machine. Seed by seed, A B C, then C B A, so that a machine that
becomes slower with time slows all variants alike. The seconds are those of training steps, as the records have them:
starts, evaluations and checkpoints are not in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from . import numbers, records, trials
from .grid import Cell, Words
from .numbers import Interval
from .rounds import Series

Commands = Callable[[Cell, Path, int], Words]
STEPS, SECONDS, ACCURACY = range(3)
"""Places in an evaluation of `records.training`."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What is trained: each variant once a seed, to its end or until an evaluation has this accuracy."""

    seeds: Sequence[int] = ()
    to_accuracy: float | None = None

    def folder(self, series: Series, seed: int) -> Path:
        """Return the folder of a training: one to another accuracy is another training."""
        until = "" if self.to_accuracy is None else f"-to-{self.to_accuracy!r}"
        return series.folder / f"seed-{seed}{until}"


def run(found: Sequence[Series], command: Commands, aim: Aim, tell: Callable[[str], None]) -> None:
    """Run the trainings that are not in their folders yet, one after the other; one that was begun goes on.

    `command` returns the words of a cell's command with this run's folder and seed. A variant whose training fails is
    trained no more. Raises what `trials.once` does.
    """
    able, target = _able(found), aim.to_accuracy
    for number, seed in enumerate(aim.seeds):
        for place, each in enumerate(able[:: -1 if number % 2 else 1], start=1):
            name, folder = each.cell.name, aim.folder(each, seed)
            if any(before.failed for before in each.trainings.values()):
                continue
            if trials.done(folder) is None:
                tell(f"training {name}, seed {seed} ({number * len(able) + place} of {len(able) * len(aim.seeds)})")
            each.trainings[seed] = trials.once(
                name,
                folder,
                command(each.cell, folder / trials.RUN, seed),
                result=partial(records.training, folder / trials.RUN, target),
                is_enough=None if target is None else records.reaching(folder / trials.RUN, target),
                goes_on=True,
            )


def left(found: Sequence[Series], aim: Aim) -> tuple[int, float]:
    """Return how many trainings are to be made yet, and the seconds that their starts and steps take at most.

    By the steps of the variants' trials; infinite where a loop does not tell how many steps it has.
    """
    waiting = [each for each in _able(found) for seed in aim.seeds if trials.done(aim.folder(each, seed)) is None]
    return len(waiting), sum(map(_training_s, waiting))


def _able(found: Sequence[Series]) -> list[Series]:
    return [each for each in found if each.trial is not None and not each.failed]


def _training_s(series: Series) -> float:
    start, config, trial = series.record.start, series.cell.config, series.trial
    steps = int(start["total_steps"])
    if config is not None and config.data.name:  # a script decides on its epochs
        steps = min(int(start["steps_per_epoch"]) * config.epochs, config.max_steps or math.inf)
    if trial is None or not steps:
        return math.inf
    return (trial.to_first_step_s or 0.0) + steps * statistics.median(trial.step_s)


def fields(series: Series, target: float | None) -> dict[str, Any]:
    """Return what a variant's trainings tell, as fields of a `Row`; nothing where there are none."""
    if not series.trainings:
        return {}
    told = [each.told for each in series.trainings.values() if not each.failed]
    ends = [each["evals"][-1] for each in told if each["evals"]]
    reached = [each["evals"][-1] for each in told if each["reached"]]
    failed = [
        f"training with seed {seed} failed: {each.failed}" for seed, each in series.trainings.items() if each.failed
    ]
    proved = "; ".join(dict.fromkeys(each["proved"] for each in told if each.get("proved")))
    return {
        "seeds": len(told),
        "accuracy": numbers.spread([each[ACCURACY] for each in ends]),
        "best_accuracy": max((each[ACCURACY] for run in told for each in run["evals"]), default=None),
        "trained_s": numbers.spread([each["train_s"] for each in told]),
        "trained_epoch_s": numbers.spread([statistics.fmean(each["epoch_s"]) for each in told if each["epoch_s"]]),
        "reached": None if target is None else len(reached),
        "to_accuracy_steps": numbers.spread([each[STEPS] for each in reached]),
        "to_accuracy_s": numbers.spread([each[SECONDS] for each in reached]),
        **({"failed": failed[0]} if failed else {}),
        **({"proved": proved} if proved else {}),
    }


def difference(ours: Series, theirs: Series, at: int, *, reached: bool = False) -> Interval:
    """Return the mean difference of the last evaluations, over the seeds that both have, in `SECONDS` or `ACCURACY`.

    With `reached`, over the seeds for which both reached the accuracy.
    """
    kind = "reached" if reached else "evals"
    mine, other = (
        {seed: each.told["evals"][-1][at] for seed, each in series.trainings.items() if each.told.get(kind)}
        for series in (ours, theirs)
    )
    return numbers.mean([value - other[seed] for seed, value in mine.items() if seed in other])


def curve(series: Series) -> list[tuple[float, float]]:
    """Return (seconds of training, accuracy) of each evaluation that all seeds have, their means."""
    seeds = [each.told["evals"] for each in series.trainings.values() if not each.failed]
    by_place = [list(zip(*same, strict=True)) for same in zip(*seeds, strict=False)]
    return [(statistics.fmean(each[SECONDS]), statistics.fmean(each[ACCURACY])) for each in by_place]
