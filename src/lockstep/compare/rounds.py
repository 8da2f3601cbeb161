"""All variants, until the ratios of their speeds are known well enough, or the time is used.

First a trial of each: whether it runs, where its time goes, what it holds. Then races: all of them live and run by
turns (see `race`). Each race starts them anew, since what differs from start to start, such as where memory lies, is
part of what an interval has to hold.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .. import hardware
from ..errors import LockstepError, RequestError, RunError, counted
from ..files import own_folder, parse_json, read, shown, understanding, write_json
from ..launchers.table import visible_gpus
from . import numbers, records, trials
from .grid import Cell, Words
from .numbers import Interval
from .race import Race
from .trials import Trial

_FEWEST = 4
"""Races before an interval may be called narrow."""
_TURN_S = 0.1
_TURNS = (12, 400)
"""At least and at most, in a race."""
_LEAST_LIMIT_S, _START_S = 60.0, 300.0
"""At least, for a trial, and for variants to come to their first turn."""
_RACED, _TRIAL = "races.json", "trial"
_MEMORY = 0.7
"""Of what is free, that variants may hold at the same time."""


@dataclass
class Series:
    """A variant, its trial, and its turns."""

    cell: Cell
    folder: Path = Path()
    trial: Trial | None = None
    races: list[list[float]] = field(default_factory=list)
    """Of each race, the steps a second of its turns."""
    trouble: str = ""
    """Why it failed in a race."""
    is_apart: bool = False
    """Whether it raced alone, since memory does not hold all variants: its turns belong to no other's."""

    @property
    def failed(self) -> str:
        """Why it is tried no more; "" while it is."""
        return self.cell.why_not or ("" if self.trial is None else self.trial.failed) or self.trouble

    @property
    def timed_to(self) -> int:
        """The last of its trial's steps that exchanged gradients, as training does."""
        return 0 if self.trial is None else self.trial.told["warm_up"] + len(self.trial.step_s)

    @property
    def devices(self) -> int:
        """The devices that its trial has used."""
        start = self.start
        return int(start.get("chosen", {}).get("devices") or start["plan"].get("ranks") or 1)

    @property
    def statistics(self) -> tuple[int, int]:
        """Into how many parts, each with batch statistics of its own, a batch is cut: among replicas, and in turn."""
        chosen, plan = self.start.get("chosen", {}), self.start["plan"]
        if chosen.get("batchnorm", "none") == "none":
            return 1, 1
        return (self.devices if chosen["batchnorm"] == "local" else 1), int(plan.get("accumulation", 1))

    @functools.cached_property
    def batch(self) -> int:
        """Samples of a step, of all ranks; 1 of a loop without a loader, where nothing tells them."""
        return int(self.start["plan"].get("global_size", 1))

    @functools.cached_property
    def start(self) -> dict[str, Any]:
        """The start event of its trial's run."""
        return records.start(self.run)

    @property
    def run(self) -> Path:
        """The folder of its trial's run."""
        return self.folder / _TRIAL / trials.RUN


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long the races go on."""

    budget_s: float
    width: float
    """Half an interval, relative to its ratio, that is narrow enough."""
    steps: int | None = None
    """Timed steps of a trial; None for as many as fill its time."""


Commands = Callable[[Cell, Path], Words]


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
    begun_s = time.monotonic()
    series = [Series(cell, folder / _safe(cell.name)) for cell in cells]
    able = [each for each in series if not each.failed]
    for number, each in enumerate(able, start=1):
        tried_s, limit_s = time.monotonic(), max(plan.budget_s / len(able), _LEAST_LIMIT_S)
        if _is_left(each):
            tell(f"trying {each.cell.name} ({number} of {len(able)}), at most {limit_s:.0f} s")
        each.trial = _trial(each, command, steps=plan.steps, limit_s=limit_s)
        if each.failed:  # one that hangs takes no time from the others
            begun_s += time.monotonic() - tried_s
        _check_time(able, number, plan, time.monotonic() - begun_s)
    living = [each for each in able if not each.failed]
    if not living:
        first = next(each for each in series if each.failed)
        log = first.folder / _TRIAL / "log"
        where = f" Its output is in {shown(log)}." if log.exists() else ""
        raise RunError(
            f"None of {counted(len(series), 'variant')} can be run; {first.cell.name}: {first.failed}{where}"
        )
    tried(series)
    if not _fit(living):
        tell("memory does not hold all variants at once: they race one after the other, which widens the intervals")
        for each in living:
            each.is_apart = True
    tried_s = time.monotonic() - begun_s
    start_s, turn_s = _start_s(living), sum(map(_turn_s, living))
    least_s = start_s + _TURNS[0] * turn_s
    if tried_s + least_s > plan.budget_s:
        raise RequestError(
            f"--budget {plan.budget_s:.0f}s is too small: trying each variant took {tried_s:.0f} s, and a race takes "
            f"{least_s:.0f} s at least; give {math.ceil(tried_s + _FEWEST * least_s)}s for {_FEWEST} races."
        )
    # As long as it takes to start: more turns narrow what turns differ by, more races what starts do.
    races_s = (plan.budget_s - tried_s) / _FEWEST
    # One that is left alone is compared with nothing: its rate is told, and no more.
    races_s = races_s if len(living) > 1 else 0.0
    turns = min(_TURNS[1], max(_TURNS[0], round(min(start_s, races_s - start_s) / turn_s)))
    number, before = 0, _raced(folder, plan)
    while living and (
        number == 0 or (number < before if before else not _is_over(living, plan, begun_s, start_s + turns * turn_s))
    ):
        number += 1
        tell(f"race {number}: {counted(turns, 'turn')} of {counted(len(living), 'variant')}{_known(living)}")
        _race(living, command, folder / f"race-{number:02}", turns)
        living = [each for each in living if not each.failed]
    write_json(folder / _RACED, {"races": number, "budget_s": plan.budget_s})
    return series


def _check_time(able: Sequence[Series], tried: int, plan: Plan, took_s: float) -> None:
    """Raise `RequestError` once it is seen that the budget does not even hold the trials."""
    known = [each.trial.seconds for each in able[:tried] if each.trial is not None and not each.trial.failed]
    waiting = sum(map(_is_left, able[tried:]))
    left_s = waiting * statistics.fmean(known) if known else 0.0
    if took_s + left_s > plan.budget_s:
        raise RequestError(
            f"--budget {plan.budget_s:.0f}s is too small: trying {tried} of {counted(len(able), 'variant')} took "
            f"{took_s:.0f} s; give {math.ceil(2 * (took_s + left_s))}s, or fewer variants."
        )


def _is_left(series: Series) -> bool:
    before = trials.done(series.folder / _TRIAL)
    return before is None or bool(before.failed)


def _raced(folder: Path, plan: Plan) -> int:
    """Return how many races there were when they ended within this budget; 0 where they have not."""
    if not (path := folder / _RACED).exists():
        return 0
    with understanding(path):
        told = parse_json(read(path))
        return int(told["races"]) if told["budget_s"] >= plan.budget_s else 0


def base_of(series: Sequence[Series]) -> Series:
    """Return the variant that the others are compared with: the first on one device, else the first that is its model.

    Replicas with batch statistics of their own are not; where all are such, it is the first.
    """
    alone = [each for each in series if each.devices == 1]
    whole = [each for each in series if each.statistics[0] == 1]
    return [*alone, *whole, *series][0]


def ratio(ours: Series, theirs: Series) -> Interval:
    """Return how many times as many steps a second `ours` makes."""
    means = [[statistics.geometric_mean(race) for race in each.races] for each in (ours, theirs)]
    return numbers.of_groups([[a / b] for a, b in zip(*means, strict=False)])


def _trial(series: Series, command: Commands, *, steps: int | None, limit_s: float) -> Trial:
    folder = series.folder / _TRIAL
    own_folder(series.folder)
    watched = ("compare", "measured", str(steps or 0), *command(series.cell, folder / trials.RUN))
    return trials.once(series.cell.name, folder, watched, limit_s=limit_s)


def _race(living: Sequence[Series], command: Commands, folder: Path, turns: int) -> None:
    """Run a race, or take what it left when it was run before."""
    path = folder / "race.json"
    if path.exists():
        with understanding(path):
            told: dict[str, Any] = parse_json(read(path))
            for each in living:
                if each.cell.name in told["rates"]:
                    each.races.append([float(rate) for rate in told["rates"][each.cell.name]])
                each.trouble = told["failed"].get(each.cell.name, "")
        return
    trials.make_anew(folder)
    rates: dict[str, list[float]] = {}
    for group in [[each] for each in living] if living[0].is_apart else [living]:
        with Race() as race:
            for each in group:
                name = _safe(each.cell.name)
                words = command(each.cell, folder / name)
                raced = (sys.executable, "-P", "-m", "lockstep", "compare", "raced", race.address(), *words)
                log, steps = folder / f"{name}.log", _steps_of_turn(each)
                race.add(each.cell.name, raced, log, steps=steps, turn_s=_turn_s(each))
            failed = race.meet(max(_START_S, 3 * _start_s(group)))
            for each in group:
                each.trouble = failed.get(each.cell.name, "")
            try:
                race.run(turns)
            except LockstepError as error:  # one that fails ends the race, and is in the next no more
                failing = [each for each in group if f"The variant {each.cell.name} failed" in str(error)]
                for each in failing or group:
                    each.trouble = each.trouble or str(error)
            rates |= {name: list(each) for name, each in race.rates.items()}
    fewest = min((len(rates[each.cell.name]) for each in living if not each.failed), default=0)
    for each in living:
        if not each.failed and fewest:
            each.races.append(rates[each.cell.name][:fewest])
    for each in living:
        each.trouble = each.trouble.removeprefix(f"The variant {each.cell.name} failed: ")
    told = {"failed": {each.cell.name: each.trouble for each in living if each.trouble}}
    told["rates"] = {each.cell.name: each.races[-1] for each in living if not each.failed and fewest}
    write_json(path, told)


def _fit(living: Sequence[Series]) -> bool:
    """Whether the variants' memory is there for all of them at the same time."""
    peaks = [(_told(each)["peak_memory_bytes"], each.devices) for each in living]
    smallest = min((gpu.memory_bytes for gpu in hardware.gpus(visible_gpus())), default=0)
    if sum((peak["device"] or 0) / devices for peak, devices in peaks) > _MEMORY * smallest:
        return False
    return bool(sum(peak["host"] for peak, _ in peaks) < _MEMORY * psutil.virtual_memory().available)


def _told(series: Series) -> dict[str, Any]:
    assert series.trial is not None
    return series.trial.told


def _step_s(series: Series) -> float:
    steps = _told(series)["step_s"]
    return float(sum(steps) / len(steps))


def _steps_of_turn(series: Series) -> int:
    """Return how many steps of a turn are timed, after one that is not.

    An epoch's first and last steps cost other times than those between. Turns of as many steps as an epoch, or of a
    part of it, would always leave out the same ones.
    """
    steps = max(2, round(_TURN_S / _step_s(series)))
    while math.gcd(steps + 1, series.start["steps_per_epoch"] or 1) > 1:
        steps += 1
    return steps


def _turn_s(series: Series) -> float:
    return (1 + _steps_of_turn(series)) * _step_s(series)  # the first one is not timed


def _start_s(living: Sequence[Series]) -> float:
    each_s = [(each.trial.to_first_step_s or 0.0) + 3 * _step_s(each) for each in living if each.trial is not None]
    if living[0].is_apart:
        return sum(each_s)
    return max(max(each_s), sum(each_s) / hardware.cpus())  # they start at the same time


def _is_over(living: Sequence[Series], plan: Plan, begun_s: float, race_s: float) -> bool:
    if time.monotonic() - begun_s + race_s > plan.budget_s:
        return True
    return len(living[0].races) >= _FEWEST and _widest(living) <= plan.width


def _widest(living: Sequence[Series]) -> float:
    base = base_of(living)
    return max((ratio(each, base).half_width for each in living if each is not base), default=0.0)


def _known(living: Sequence[Series]) -> str:
    width = _widest(living) if len(living[0].races) > 1 else math.inf
    return f", ratios known to ±{width:.1%}" if width < 1 else ""


def _safe(name: str) -> str:
    """Return the name as one of a folder's."""
    return "".join(each if each.isalnum() or each in "-_.+=" else "_" for each in name)
