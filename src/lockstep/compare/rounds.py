"""The course of a comparison: trials, races, whole trainings (docs/compare.md).

Each race starts the variants anew: differences between starts, such as memory placement, are part of what an interval
has to hold. Trainings go seed by seed, A B C, then C B A, so that a machine that becomes slower with time slows all
variants alike.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .. import hardware
from ..errors import RequestError, RunError, counted
from ..files import own_folder, shown, understanding, write_json
from ..launchers.devices import visible_gpus
from ..record.console import duration
from . import numbers, race, records, trials
from .grid import Cell, Words
from .numbers import Interval
from .records import Record
from .trials import Trial

_FEWEST = 4  # races before an interval may be called narrow
_WIDTH = 0.02  # half an interval, relative to its ratio, that is narrow enough
_TURN_S, _TURNS = 0.1, (12, 400)  # expected seconds of a turn; the least and the most turns of a race
_LEAST_LIMIT_S, _START_S = 60.0, 300.0  # at least, for a trial, and for variants to come to their first turn
_LEAST_S = (1.5, 1.0)  # of a trial on any machine: the start of Python and torch, and the warm-up
_USUAL_S = 20.0  # for a variant's trial and races, usually
_MEMORY = 0.7  # share of the free memory that variants may hold at the same time
_TRIAL = "trial"
_UNTRIED = Trial(told={}, seconds=0.0)
Commands = Callable[[Cell, Path], Words]
Tell = Callable[[str], None]


@dataclass
class Series:
    """A variant's trial, races and trainings. Races are steps per second by turn, trainings by seed."""

    cell: Cell
    folder: Path = Path()
    trial: Trial = _UNTRIED
    races: list[list[float]] = field(default_factory=list)
    trouble: str = ""  # why it failed in a race
    trainings: dict[int, Trial] = field(default_factory=dict)

    @property
    def failed(self) -> str:
        """The reason to skip the variant; "" for none."""
        return self.cell.why_not or self.trial.failed or self.trouble

    @property
    def step_s(self) -> float:
        """Seconds of a mean step of its trial."""
        return statistics.fmean(self.trial.told["step_s"])

    @property
    def start_s(self) -> float:
        """Seconds from its command's start to the first step to time."""
        return (self.trial.to_first_step_s or 0.0) + 3 * self.step_s

    @property
    def turn_steps(self) -> int:
        """The number of timed steps of a turn, after one untimed.

        An epoch's first and last steps cost other times than those between. Turns of as many steps as an epoch, or of a
        part of it, would always leave out the same ones.
        """
        steps = max(2, round(_TURN_S / self.step_s))
        while math.gcd(steps + 1, self.record.start["steps_per_epoch"] or 1) > 1:
            steps += 1
        return steps

    @property
    def turn_s(self) -> float:
        """Seconds of a turn."""
        return (1 + self.turn_steps) * self.step_s

    @functools.cached_property
    def record(self) -> Record:
        """The record of its trial's run."""
        return records.record(self.folder / _TRIAL / trials.RUN)

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks; 1 if unknown."""
        return int(self.record.plan.get("global_size", 1))

    @property
    def batch_parts(self) -> tuple[int, int]:
        """Parts of a batch with own batch statistics: (replicas, micro-batches)."""
        if (batchnorm := self.record.chosen.get("batchnorm", "none")) == "none":
            return 1, 1
        return (self.record.devices if batchnorm == "local" else 1), int(self.record.plan.get("accumulation", 1))

    @property
    def draw_parts(self) -> tuple[int, int]:
        """Parts of a batch whose random draws are not those of one device: (replicas of a process, micro-batches)."""
        ranks = int(self.trial.told.get("ranks") or 1)
        return max(1, self.record.devices // ranks), int(self.record.plan.get("accumulation", 1))

    @property
    def rates(self) -> list[float]:
        """Steps per second of each race.

        Differences between races are a random effect: their means are the sample (Searle, Casella & McCulloch, Variance
        Components, 1992).
        """
        return [statistics.geometric_mean(race) for race in self.races]

    def ratio(self, other: Series) -> Interval:
        """Return the ratio of samples per second to another variant's."""
        ratios = [mine / its for mine, its in zip(self.rates, other.rates, strict=False)]
        return numbers.geometric_mean(ratios).times(self.batch / other.batch)


@dataclass(frozen=True)
class Plan:
    """The limits of a comparison: the time of its trials and races, and its whole trainings."""

    budget_s: float
    steps: int | None = None  # timed steps of a trial; None for as many as fill its time
    seeds: Sequence[int] = ()  # of whole trainings
    to_accuracy: float | None = None  # ends a training

    def folder(self, series: Series, seed: int) -> Path:
        """Return a training's folder. Another target accuracy gives another folder."""
        until = "" if self.to_accuracy is None else f"-to-{self.to_accuracy!r}"
        return series.folder / f"seed-{seed}{until}"


def run(cells: Sequence[Cell], command: Commands, folder: Path, plan: Plan, tell: Tell) -> list[Series]:
    """Run the trials and races that `folder` lacks, and return all.

    `command` returns the words of a cell's command that writes to the run's folder it is given. Raises `RequestError`
    where the budget is too small for a race, and `RunError` where no variant can be run.
    """
    series = [Series(cell, folder / _safe(cell.name)) for cell in cells]
    living = _try(series, command, plan, folder, tell)
    together = _fit(living)
    if not together:
        tell("memory does not hold all variants at once: they race one after the other, which widens the intervals")
    spent_s = sum(each.trial.seconds for each in living)
    start_s, turn_s = _start_s(living, together=together), sum(each.turn_s for each in living)
    check_budget(plan, len(living), spent_s, start_s + _TURNS[0] * turn_s, folder)
    # As long as the starts take: more turns reduce the error from turns, more races that from starts.
    races_s = (plan.budget_s - spent_s) / _FEWEST if len(living) > 1 else 0.0  # a lone variant has no ratio
    turns = min(_TURNS[1], max(_TURNS[0], round(min(start_s, races_s - start_s) / turn_s)))
    number, width = 0, math.inf
    while living and (number == 0 or spent_s + start_s + turns * turn_s <= plan.budget_s):
        if number >= _FEWEST and (width <= _WIDTH or len(living) == 1):
            break
        number += 1
        known = f", ratios known to ±{width:.1%}" if width < 1 and len(living) > 1 else ""
        tell(f"race {number}: {counted(turns, 'turn')} of {counted(len(living), 'variant')}{known}")
        spent_s += _race(living, command, folder / f"race-{number:02}", turns, together=together)
        living = [each for each in living if not each.failed]
        width = _widest(living) if living else math.inf
    return series


def check_budget(
    plan: Plan, count: int, trials_s: float = 0.0, race_s: float = 0.0, folder: Path | None = None
) -> None:
    """Raise `RequestError` where so many variants' trials and a race take longer than the budget.

    Without measurements in a `folder`, they take what they take on any machine.
    """
    trials_s = max(trials_s, count * sum(_LEAST_S))
    race_s = max(race_s, _LEAST_S[0] + _TURNS[0] * _TURN_S * count)
    if trials_s + race_s > plan.budget_s:
        enough_s = max(count * _USUAL_S, trials_s + _FEWEST * race_s)
        keeping = f" and --output {shown(folder)}, which keeps what was tried" if folder else ""
        raise RequestError(
            f"--budget {plan.budget_s:.0f}s is too small for {counted(count, 'variant')}: trying them takes "
            f"{trials_s:.0f} s, and a race {race_s:.0f} s at least; give {math.ceil(enough_s)}s{keeping}, or vary less."
        )


def _try(series: Sequence[Series], command: Commands, plan: Plan, folder: Path, tell: Tell) -> list[Series]:
    """Try each variant; return the working ones."""
    able = [each for each in series if not each.failed]
    for number, each in enumerate(able, start=1):
        name, path, limit_s = each.cell.name, each.folder / _TRIAL, max(plan.budget_s / len(able), _LEAST_LIMIT_S)
        if trials.done(path) is None:
            tell(f"trying {name} ({number} of {len(able)}), at most {limit_s:.0f} s")
        own_folder(each.folder)
        words = (str(plan.steps or 0), *command(each.cell, path / trials.RUN))
        each.trial = trials.measure(name, path, words, limit_s=limit_s)
        if tried := [before for before in able[:number] if not before.failed]:
            count = len(tried) + len(able) - number
            trial_s = statistics.fmean(before.trial.seconds for before in tried)
            turn_s = statistics.fmean(before.turn_s for before in tried)
            race_s = _start_s(tried, together=True) + _TURNS[0] * count * turn_s
            check_budget(plan, count, count * trial_s, race_s, folder)
    living = [each for each in able if not each.failed]
    if not living:
        first, what = series[0], counted(len(series), "variant")
        raise RunError(f"None of {what} can be run; {first.cell.name}: {first.failed}")
    return living


def base_of(series: Sequence[Series]) -> Series:
    """Return the base variant of all ratios.

    The first on one device, else the first that is its model (replicas with batch statistics of their own are not),
    else the first.
    """
    alone = [each for each in series if each.record.devices == 1]
    whole = [each for each in series if each.batch_parts[0] == 1]
    return [*alone, *whole, *series][0]


def _race(living: Sequence[Series], command: Commands, folder: Path, turns: int, *, together: bool) -> float:
    """Run a race, or read a former one; return its seconds."""
    path = folder / "race.json"
    if not path.exists():
        trials.make_free(folder)
        begun_s, rates, failed = time.monotonic(), dict[str, list[float]](), dict[str, str]()
        for group in [living] if together else [[each] for each in living]:
            entrants = []
            for each in group:
                own, turn = folder / _safe(each.cell.name), (each.turn_steps, each.turn_s)
                entrants.append(race.Entrant(each.cell.name, command(each.cell, own), Path(f"{own}.log"), *turn))
            found, trouble = race.run(entrants, turns, max(_START_S, 3 * _start_s(group, together=True)))
            rates, failed = rates | found, failed | trouble
        rates = {name: each for name, each in rates.items() if name not in failed}
        fewest = min(map(len, rates.values()), default=0)
        rates = {name: each[:fewest] for name, each in rates.items() if fewest}
        write_json(path, {"failed": failed, "rates": rates, "seconds": time.monotonic() - begun_s})
    told = records.json_of(path)
    with understanding(path):
        for each in living:
            each.trouble = told["failed"].get(each.cell.name, "")
            if rated := told["rates"].get(each.cell.name):
                each.races.append([float(rate) for rate in rated])
        return float(told.get("seconds", 0.0))


def _fit(living: Sequence[Series]) -> bool:
    """Return whether memory holds all variants at the same time."""
    peaks = [(each.trial.told["peak_memory_bytes"], each.record.devices) for each in living]
    smallest = min((gpu.memory_bytes for gpu in hardware.gpus(visible_gpus())), default=0)
    if sum((peak["device"] or 0) / devices for peak, devices in peaks) > _MEMORY * smallest:
        return False
    return bool(sum(peak["host"] for peak, _ in peaks) < _MEMORY * psutil.virtual_memory().available)


def _start_s(series: Sequence[Series], *, together: bool) -> float:
    """Return how long starts take, at the same time or one after the other."""
    starts_s = [each.start_s for each in series]
    return max(*starts_s, sum(starts_s) / hardware.cpus()) if together else sum(starts_s)


def _widest(living: Sequence[Series]) -> float:
    base = base_of(living)
    return max(each.ratio(base).half_width for each in living)


def _safe(name: str) -> str:
    """Return the name as a folder name."""
    return "".join(each if each.isalnum() or each in "-_.+=" else "_" for each in name)


def train(found: Sequence[Series], command: Callable[[Cell, Path, int], Words], plan: Plan, tell: Tell) -> None:
    """Run the missing whole trainings, one after the other.

    An interrupted one continues. `command` returns the words of a cell's command with this run's folder and seed. A
    variant whose training fails is not trained further. Raises what `trials.once` does.
    """
    able, target = [each for each in found if not each.failed], plan.to_accuracy
    for number, seed in enumerate(plan.seeds):
        for place, each in enumerate(able[:: -1 if number % 2 else 1], start=1):
            folder = plan.folder(each, seed)
            if any(before.failed for before in each.trainings.values()):
                continue
            if trials.done(folder) is None:
                place_of = f"({number * len(able) + place} of {len(able) * len(plan.seeds)})"
                about = f", about {duration(seconds)} and evaluations" if (seconds := _training_s(each)) else ""
                tell(f"training {each.cell.name}, seed {seed} {place_of}{about}")
            run_folder = folder / trials.RUN
            each.trainings[seed] = trials.once(
                each.cell.name,
                folder,
                command(each.cell, run_folder, seed),
                result=functools.partial(records.training, run_folder, target),
                is_enough=None if target is None else records.reaching(run_folder, target),
                goes_on=True,
            )


def _training_s(series: Series) -> float:
    """Return how long a training takes, by the trial; 0 where unknown."""
    start, config = series.record.start, series.cell.config
    steps = int(start["total_steps"])
    if config is not None and config.data.name:  # a script decides on its epochs
        steps = min(int(start["steps_per_epoch"]) * config.epochs, config.max_steps or steps)
    return series.start_s + steps * series.step_s if steps else 0.0
