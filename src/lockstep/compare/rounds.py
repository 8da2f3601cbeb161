"""All variants, until the ratios of their speeds are known well enough, or the time is used.

First a trial of each: whether it runs, where its time goes, what it holds. Then races: all of them live and run by
turns (see `race`). Each race starts them anew, since what differs from start to start, such as where memory lies, is
part of what an interval has to hold.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .. import hardware
from ..errors import RequestError, RunError, counted
from ..files import own_folder, shown, understanding, write_json
from ..launchers.table import visible_gpus
from . import numbers, race, records, trials
from .grid import Cell, Words
from .numbers import Interval
from .records import Record
from .trials import Trial

_FEWEST = 4
"""Races before an interval may be called narrow."""
_TURN_S = 0.1
_TURNS = (12, 400)
"""At least and at most, in a race."""
_LEAST_LIMIT_S, _START_S = 60.0, 300.0
"""At least, for a trial, and for variants to come to their first turn."""
_MEMORY = 0.7
"""Of what is free, that variants may hold at the same time."""
Commands = Callable[[Cell, Path], Words]


@dataclass
class Series:
    """A variant, its trial, its turns, and its whole trainings."""

    cell: Cell
    folder: Path = Path()
    trial: Trial | None = None
    races: list[list[float]] = field(default_factory=list)
    """Of each race, the steps a second of its turns."""
    trouble: str = ""
    """Why it failed in a race."""
    trainings: dict[int, Trial] = field(default_factory=dict)
    """By seed; what each has told is as in `records.training`."""

    @property
    def failed(self) -> str:
        """Why it is tried no more; "" while it is."""
        return self.cell.why_not or ("" if self.trial is None else self.trial.failed) or self.trouble

    @property
    def told(self) -> dict[str, Any]:
        """What its trial has told."""
        return {} if self.trial is None else self.trial.told

    @property
    def step_s(self) -> float:
        """Seconds of a mean step of its trial."""
        return statistics.fmean(self.told["step_s"])

    @property
    def timed_to(self) -> int:
        """The last of its trial's steps that exchanged gradients, as training does."""
        return int(self.told["warm_up"]) + len(self.told["step_s"])

    @functools.cached_property
    def record(self) -> Record:
        """The record of its trial's run."""
        return records.record(self.folder / _TRIAL / trials.RUN)

    @property
    def plan(self) -> dict[str, Any]:
        """The batch plan; empty of a loop without a loader, where nothing tells samples."""
        return self.record.start["plan"] or {}

    @property
    def batch(self) -> int:
        """Samples of a step, of all ranks; 1 where nothing tells them."""
        return int(self.plan.get("global_size", 1))

    @property
    def devices(self) -> int:
        """The devices that its trial has used."""
        return int(self.record.start.get("chosen", {}).get("devices") or self.plan.get("ranks") or 1)

    @property
    def batch_parts(self) -> tuple[int, int]:
        """Into how many parts, each with batch statistics of its own, a batch is cut: among replicas, and in turn."""
        batchnorm = self.record.start.get("chosen", {}).get("batchnorm", "none")
        if batchnorm == "none":
            return 1, 1
        return (self.devices if batchnorm == "local" else 1), int(self.plan.get("accumulation", 1))

    def ratio(self, other: Series) -> Interval:
        """Return how many times as many samples a second it has."""
        means = [[statistics.geometric_mean(race) for race in each.races] for each in (self, other)]
        steps = numbers.of_groups([[a / b] for a, b in zip(*means, strict=False)])
        return steps.times(self.batch / other.batch)


_TRIAL = "trial"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the races go on."""

    budget_s: float
    """Of all that is kept: trials and races of variants that work."""
    width: float
    """Half an interval, relative to its ratio, that is narrow enough."""
    steps: int | None = None
    """Timed steps of a trial; None for as many as fill its time."""


def run(
    cells: Sequence[Cell],
    command: Commands,
    folder: Path,
    plan: Plan,
    tell: Callable[[str], None],
    tried: Callable[[list[Series]], None] = lambda _: None,
) -> list[Series]:
    """Run the trials and races that `folder` does not hold yet, and return all.

    `command` returns the words of a cell's command that writes to the run's folder it is given; `tried` is called
    between trials and races. Raises `RequestError` where the budget is too small for a race, and `RunError` where no
    variant can be run.
    """
    series = [Series(cell, folder / _safe(cell.name)) for cell in cells]
    living = _tried(series, command, plan, tell)
    tried(series)
    groups = [living]
    if not _fit(living):
        tell("memory does not hold all variants at once: they race one after the other, which widens the intervals")
        groups = [[each] for each in living]
    spent_s, start_s, turn_s = _trials_s(living), sum(map(_start_s, groups)), sum(map(_turn_s, living))
    least_s = start_s + _TURNS[0] * turn_s
    if spent_s + least_s > plan.budget_s:
        raise RequestError(
            f"--budget {plan.budget_s:.0f}s is too small: trying each variant took {spent_s:.0f} s, and a race takes "
            f"{least_s:.0f} s at least; give {math.ceil(spent_s + _FEWEST * least_s)}s for {_FEWEST} races."
        )
    # As long as it takes to start: more turns narrow what turns differ by, more races what starts do.
    races_s = (plan.budget_s - spent_s) / _FEWEST
    turns = min(_TURNS[1], max(_TURNS[0], round(min(start_s, races_s - start_s) / turn_s)))
    number = 0
    while living and (number == 0 or spent_s + start_s + turns * turn_s <= plan.budget_s):
        if number >= _FEWEST and _widest(living) <= plan.width:
            break
        number += 1
        width = _widest(living) if number > 2 else math.inf
        known = f", ratios known to ±{width:.1%}" if width < 1 else ""
        tell(f"race {number}: {counted(turns, 'turn')} of {counted(len(living), 'variant')}{known}")
        spent_s += _race(groups, command, folder / f"race-{number:02}", turns)
        living = [each for each in living if not each.failed]
        groups = [alive for group in groups if (alive := [each for each in group if not each.failed])]
    return series


def _tried(series: Sequence[Series], command: Commands, plan: Plan, tell: Callable[[str], None]) -> list[Series]:
    """Try each variant, and return those that work."""
    able = [each for each in series if not each.failed]
    for number, each in enumerate(able, start=1):
        name, path, limit_s = each.cell.name, each.folder / _TRIAL, max(plan.budget_s / len(able), _LEAST_LIMIT_S)
        if trials.done(path) is None:
            tell(f"trying {name} ({number} of {len(able)}), at most {limit_s:.0f} s")
        own_folder(each.folder)
        watched = ("compare", "measured", str(plan.steps or 0), *command(each.cell, path / trials.RUN))
        each.trial = trials.once(name, path, watched, limit_s=limit_s)
        working = [each for each in able[:number] if not each.failed]  # one that hangs takes no time from the others
        took_s = _trials_s(working)
        all_s = took_s / max(len(working), 1) * (len(working) + len(able) - number)
        if all_s > plan.budget_s:
            raise RequestError(
                f"--budget {plan.budget_s:.0f}s is too small: trying {number} of {counted(len(able), 'variant')} took "
                f"{took_s:.0f} s; give {math.ceil(2 * all_s)}s, or fewer variants."
            )
    living = [each for each in able if not each.failed]
    if not living:
        first = series[0]
        log = first.folder / _TRIAL / "log"
        where = f" Its output is in {shown(log)}." if log.exists() else ""
        what = counted(len(series), "variant")
        raise RunError(f"None of {what} can be run; {first.cell.name}: {first.failed}{where}")
    return living


def base_of(series: Sequence[Series]) -> Series:
    """Return the variant that the others are compared with: the first on one device, else the first that is its model.

    Replicas with batch statistics of their own are not; where all are such, it is the first.
    """
    alone = [each for each in series if each.devices == 1]
    whole = [each for each in series if each.batch_parts[0] == 1]
    return [*alone, *whole, *series][0]


def _race(groups: Sequence[Sequence[Series]], command: Commands, folder: Path, turns: int) -> float:
    """Run a race, or take what it left when it was run before; return the seconds that it took."""
    path = folder / "race.json"
    living = [each for group in groups for each in group]
    if not path.exists():
        trials.make_free(folder)
        begun_s = time.monotonic()
        rates: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        for group in groups:
            entrants = [_entrant(each, command, folder) for each in group]
            found, trouble = race.run(entrants, turns, max(_START_S, 3 * _start_s(group)))
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


def _entrant(series: Series, command: Commands, folder: Path) -> race.Entrant:
    name = _safe(series.cell.name)

    def raced(address: str) -> Words:
        return trials.command("compare", "raced", address, *command(series.cell, folder / name))

    return race.Entrant(series.cell.name, raced, folder / f"{name}.log", _steps_of_turn(series), _turn_s(series))


def _fit(living: Sequence[Series]) -> bool:
    """Whether the variants' memory is there for all of them at the same time."""
    peaks = [(each.told["peak_memory_bytes"], each.devices) for each in living]
    smallest = min((gpu.memory_bytes for gpu in hardware.gpus(visible_gpus())), default=0)
    if sum((peak["device"] or 0) / devices for peak, devices in peaks) > _MEMORY * smallest:
        return False
    return bool(sum(peak["host"] for peak, _ in peaks) < _MEMORY * psutil.virtual_memory().available)


def _trials_s(living: Sequence[Series]) -> float:
    return sum(each.trial.seconds for each in living if each.trial is not None)


def _steps_of_turn(series: Series) -> int:
    """Return how many steps of a turn are timed, after one that is not.

    An epoch's first and last steps cost other times than those between. Turns of as many steps as an epoch, or of a
    part of it, would always leave out the same ones.
    """
    steps = max(2, round(_TURN_S / series.step_s))
    while math.gcd(steps + 1, series.record.start["steps_per_epoch"] or 1) > 1:
        steps += 1
    return steps


def _turn_s(series: Series) -> float:
    return (1 + _steps_of_turn(series)) * series.step_s  # the first one is not timed


def _start_s(group: Sequence[Series]) -> float:
    each_s = [(each.trial.to_first_step_s or 0.0) + 3 * each.step_s for each in group if each.trial is not None]
    return max(max(each_s), sum(each_s) / hardware.cpus())  # they start at the same time


def _widest(living: Sequence[Series]) -> float:
    base = base_of(living)
    return max((each.ratio(base).half_width for each in living if each is not base), default=0.0)


def _safe(name: str) -> str:
    """Return the name as one of a folder's."""
    return "".join(each if each.isalnum() or each in "-_.+=" else "_" for each in name)
