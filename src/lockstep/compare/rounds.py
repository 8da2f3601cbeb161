"""The course of a comparison: trials, races, whole trainings (docs/compare.md).

Each race restarts the variants: an interval must include the differences between starts, such as memory placement.
Trainings go seed by seed, A B C, then C B A, so that a machine that becomes slower with time slows all variants alike.
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

_FEWEST = 4  # races before an interval counts as narrow
_WIDTH = 0.02  # half of a narrow interval, relative to its ratio
_TURN_S, _TURNS = 0.1, (12, 400)  # expected seconds of a turn; least and most turns of a race
_LEAST_LIMIT_S, _START_S = 60.0, 300.0  # at least: for a trial, and for variants to reach their first turn
_LEAST_S = (1.5, 1.0)  # of a trial on any machine: the start of Python and torch, and the warm-up
_USUAL_S = 20.0  # for a variant's trial and races, usually
_MEMORY = 0.7  # share of the free memory that variants may hold at the same time
_TRIAL = "trial"
_UNTRIED = Trial(results={}, seconds=0.0)
Commands = Callable[[Cell, Path], Words]
Notify = Callable[[str], None]


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
        """The reason to skip the variant; "" if it works."""
        return self.cell.why_not or self.trial.failed or self.trouble

    @property
    def step_s(self) -> float:
        """Seconds of a mean step of its trial."""
        return statistics.fmean(self.trial.results["step_s"])

    @property
    def start_s(self) -> float:
        """Seconds from its command's start to the first step to time."""
        return (self.trial.to_first_step_s or 0.0) + 3 * self.step_s

    @property
    def turn_steps(self) -> int:
        """The number of timed steps of a turn, after one untimed.

        An epoch's first and last steps take longer or shorter than those between. A turn as long as an epoch, or a part
        of one, would always leave out the same steps.
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
        """Parts of a batch with separate batch statistics: (replicas, micro-batches)."""
        if (batchnorm := self.record.chosen.get("batchnorm", "none")) == "none":
            return 1, 1
        return (self.record.devices if batchnorm == "local" else 1), int(self.record.plan.get("accumulation", 1))

    @property
    def draw_parts(self) -> tuple[int, int]:
        """Parts of a batch with separate random draws: (replicas of a process, micro-batches)."""
        ranks = int(self.trial.results.get("ranks") or 1)
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
        ratios = [rate / other_rate for rate, other_rate in zip(self.rates, other.rates, strict=False)]
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


def run(cells: Sequence[Cell], command: Commands, folder: Path, plan: Plan, notify: Notify) -> list[Series]:
    """Run the trials and races that `folder` lacks, and return all.

    `command(cell, folder)` returns the words of a cell's command with its run's folder. Raises `RequestError` if the
    budget is too small for a race, and `RunError` if no variant can be run.
    """
    series = [Series(cell, folder / _safe(cell.name)) for cell in cells]
    working = _try(series, command, plan, folder, notify)
    together = _fit(working)
    if not together:
        notify("memory cannot hold all variants at once: they run one after the other, which widens the intervals")
    spent_s = sum(variant.trial.seconds for variant in working)
    start_s, turn_s = _start_s(working, together=together), sum(variant.turn_s for variant in working)
    check_budget(plan, len(working), spent_s, start_s + _TURNS[0] * turn_s, folder)
    # Turns last as long as starts: more turns reduce the error of turns, more races that of starts.
    races_s = (plan.budget_s - spent_s) / _FEWEST if len(working) > 1 else 0.0  # a lone variant has no ratio
    turns = min(_TURNS[1], max(_TURNS[0], round(min(start_s, races_s - start_s) / turn_s)))
    number, width = 0, math.inf
    while working and (number == 0 or spent_s + start_s + turns * turn_s <= plan.budget_s):
        if number >= _FEWEST and (width <= _WIDTH or len(working) == 1):
            break
        number += 1
        precision = f", ratios known to ±{width:.1%}" if width < 1 and len(working) > 1 else ""
        notify(f"race {number}: {counted(turns, 'turn')} of {counted(len(working), 'variant')}{precision}")
        spent_s += _race(working, command, folder / f"race-{number:02}", turns, together=together)
        working = [variant for variant in working if not variant.failed]
        width = _widest(working) if working else math.inf
    return series


def check_budget(
    plan: Plan, count: int, trials_s: float = 0.0, race_s: float = 0.0, folder: Path | None = None
) -> None:
    """Raise `RequestError` if the trials and a race of `count` variants take longer than the budget.

    Times default to the least on any machine.
    """
    trials_s = max(trials_s, count * sum(_LEAST_S))
    race_s = max(race_s, _LEAST_S[0] + _TURNS[0] * _TURN_S * count)
    if trials_s + race_s > plan.budget_s:
        enough_s = max(count * _USUAL_S, trials_s + _FEWEST * race_s)
        keeping = f" and --output {shown(folder)}, which keeps the trials" if folder else ""
        raise RequestError(
            f"--budget {plan.budget_s:.0f}s is too small for {counted(count, 'variant')}: trying them takes "
            f"{trials_s:.0f} s, and a race at least {race_s:.0f} s; give {math.ceil(enough_s)}s{keeping}, or vary less."
        )


def _try(series: Sequence[Series], command: Commands, plan: Plan, folder: Path, notify: Notify) -> list[Series]:
    """Try each variant; return the working ones."""
    candidates = [variant for variant in series if not variant.failed]
    for number, variant in enumerate(candidates, start=1):
        name, path = variant.cell.name, variant.folder / _TRIAL
        limit_s = max(plan.budget_s / len(candidates), _LEAST_LIMIT_S)
        if trials.done(path) is None:
            notify(f"trying {name} ({number} of {len(candidates)}), at most {limit_s:.0f} s")
        own_folder(variant.folder)
        words = (str(plan.steps or 0), *command(variant.cell, path / trials.RUN))
        variant.trial = trials.measure(name, path, words, limit_s=limit_s)
        if tried := [other for other in candidates[:number] if not other.failed]:
            count = len(tried) + len(candidates) - number
            trial_s = statistics.fmean(other.trial.seconds for other in tried)
            turn_s = statistics.fmean(other.turn_s for other in tried)
            race_s = _start_s(tried, together=True) + _TURNS[0] * count * turn_s
            check_budget(plan, count, count * trial_s, race_s, folder)
    if working := [variant for variant in candidates if not variant.failed]:
        return working
    total, first = counted(len(series), "variant"), series[0]
    raise RunError(f"None of {total} can be run; {first.cell.name}: {first.failed}")


def base_of(series: Sequence[Series]) -> Series:
    """Return the base variant of all ratios.

    The first on one device, else the first without separate batch statistics per replica, else the first.
    """
    single = [variant for variant in series if variant.record.devices == 1]
    undivided = [variant for variant in series if variant.batch_parts[0] == 1]
    return [*single, *undivided, *series][0]


def _race(working: Sequence[Series], command: Commands, folder: Path, turns: int, *, together: bool) -> float:
    """Run a race, or read an earlier one; return its seconds."""
    path = folder / "race.json"
    if not path.exists():
        trials.make_free(folder)
        begun_s, rates, failed = time.monotonic(), dict[str, list[float]](), dict[str, str]()
        for group in [working] if together else [[variant] for variant in working]:
            entrants = []
            for variant in group:
                target, turn = folder / _safe(variant.cell.name), (variant.turn_steps, variant.turn_s)
                words = command(variant.cell, target)
                entrants.append(race.Entrant(variant.cell.name, words, Path(f"{target}.log"), *turn))
            group_rates, group_failed = race.run(entrants, turns, max(_START_S, 3 * _start_s(group, together=True)))
            rates, failed = rates | group_rates, failed | group_failed
        rates = {name: speeds for name, speeds in rates.items() if name not in failed}
        fewest = min(map(len, rates.values()), default=0)
        rates = {name: speeds[:fewest] for name, speeds in rates.items() if fewest}
        write_json(path, {"failed": failed, "rates": rates, "seconds": time.monotonic() - begun_s})
    result = records.json_of(path)
    with understanding(path):
        for variant in working:
            variant.trouble = result["failed"].get(variant.cell.name, "")
            if speeds := result["rates"].get(variant.cell.name):
                variant.races.append([float(speed) for speed in speeds])
        return float(result.get("seconds", 0.0))


def _fit(working: Sequence[Series]) -> bool:
    """Return whether memory holds all variants at the same time."""
    peaks = [(variant.trial.results["peak_memory_bytes"], variant.record.devices) for variant in working]
    smallest = min((gpu.memory_bytes for gpu in hardware.gpus(visible_gpus())), default=0)
    if sum((peak["device"] or 0) / devices for peak, devices in peaks) > _MEMORY * smallest:
        return False
    return bool(sum(peak["host"] for peak, _ in peaks) < _MEMORY * psutil.virtual_memory().available)


def _start_s(series: Sequence[Series], *, together: bool) -> float:
    """Return the seconds of all starts, concurrent or one after the other."""
    starts_s = [variant.start_s for variant in series]
    return max(*starts_s, sum(starts_s) / hardware.cpus()) if together else sum(starts_s)


def _widest(working: Sequence[Series]) -> float:
    base = base_of(working)
    return max(variant.ratio(base).half_width for variant in working)


def _safe(name: str) -> str:
    """Return the name as a folder name."""
    return "".join(character if character.isalnum() or character in "-_.+=" else "_" for character in name)


def train(series: Sequence[Series], command: Callable[[Cell, Path, int], Words], plan: Plan, notify: Notify) -> None:
    """Run the missing whole trainings, one after the other.

    An interrupted training continues. `command(cell, folder, seed)` returns the words of a cell's command. A variant
    whose training fails is not trained further. Raises as `trials.once` does.
    """
    working, target = [variant for variant in series if not variant.failed], plan.to_accuracy
    for number, seed in enumerate(plan.seeds):
        for place, variant in enumerate(working[:: -1 if number % 2 else 1], start=1):
            folder = plan.folder(variant, seed)
            if any(training.failed for training in variant.trainings.values()):
                continue
            if trials.done(folder) is None:
                place_of = f"({number * len(working) + place} of {len(working) * len(plan.seeds)})"
                about = f", about {duration(seconds)} and evaluations" if (seconds := _training_s(variant)) else ""
                notify(f"training {variant.cell.name}, seed {seed} {place_of}{about}")
            run_folder = folder / trials.RUN
            variant.trainings[seed] = trials.once(
                variant.cell.name,
                folder,
                command(variant.cell, run_folder, seed),
                result=functools.partial(records.training, run_folder, target),
                is_enough=None if target is None else records.reaching(run_folder, target),
                goes_on=True,
            )


def _training_s(series: Series) -> float:
    """Return the seconds of a training, by the trial; 0 if unknown."""
    start, config = series.record.start, series.cell.config
    steps = int(start["total_steps"])
    if config is not None and config.data.name:  # a script sets its own epochs
        steps = min(int(start["steps_per_epoch"]) * config.epochs, config.max_steps or steps)
    return series.start_s + steps * series.step_s if steps else 0.0
