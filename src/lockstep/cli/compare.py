"""`lockstep compare [RECIPE | SCRIPT] --vary OPTION=VALUES …`: variants of one job, measured side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import folders, hardware
from ..compare import answer, grid, past, records, rounds, rows, whole
from ..compare.grid import Cell
from ..compare.measured import Measured, Raced, Share
from ..compare.report import HTML, Report, over_seeds, write
from ..compare.rounds import Series
from ..compare.rows import PARTS, Row
from ..compare.whole import Aim
from ..config import RunConfig
from ..errors import RequestError, RunError, Stopped, counted
from ..files import own_folder, shown
from ..launchers import table as launchers
from ..launchers.lifeline import end_with_parent
from ..launchers.table import visible_gpus
from ..options import flatten
from ..record.console import duration
from ..screen import Screen
from ..script import Script
from ..versions import version_of
from . import flags, output, run, words
from .train import entry
from .variants import Job, crowded, folder_of, machine, scaling, telling

if TYPE_CHECKING:
    from ..world import World

_USAGE = """\
usage: lockstep compare [RECIPE] [--vary OPTION=VALUE,VALUE …] [flags of lockstep train]
       lockstep compare [--vary OPTION=VALUE,VALUE …] [flags of lockstep run] SCRIPT [its own flags], or -m MODULE
       lockstep compare --from RUN … [--output FOLDER]       a report on runs that have ended

Measures variants of one job side by side: the same seed, global batch and order, each in processes of its own. They run
by turns (A B C C B A …), until the ratios of their speeds are known to 2 %, or the time is used. Says which to take and
where the time goes. Without --vary, those that make sense on this machine. With --seeds or --to-accuracy each is then
trained whole, alone on the machine, once a seed: its accuracy and time, as mean ± sample standard deviation.

  --vary OPTION=…    values of any flag of lockstep train: --vary strategy=single,dp,ddp --vary devices=1,2
  --budget TIME      how long trials and turns may take (default: 2m; s, m or h)
  --seeds N          whole trainings of each variant, with --seed and the numbers after it
  --to-accuracy A    end each of them once an evaluation has this accuracy, such as 0.94 (default: 3 seeds)
  --scaling weak     the same batch for each device; by default the same global batch (strong)
  --steps N          steps of the trial that tells where the time goes; by default as many as fill its time
  --tolerance T      relative difference of losses that counts as the same model (default: 1e-3, 1e-9 in fp64,
                     1e-2 with Muon)
  --yes              run more than 64 variants
  --from RUN …       a report on runs that have ended, which are ways of one job
  --output FOLDER    default: runs/NAME-comparison; a comparison that was stopped there goes on

Exit code: 0 measured, 1 no variant could be, 2 it cannot be tried.
"""
_PROG = "lockstep compare"
OWN: dict[str, type] = {
    "--vary": list,
    "--budget": str,
    "--seeds": str,
    "--to-accuracy": str,
    "--scaling": str,
    "--steps": str,
    "--tolerance": float,
    "--yes": bool,
}
_SEEDS = 3
_ENDLESS = 10**6
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WATCHED: dict[str, Any] = {"measured": Measured, "share": Share}


def main(given: list[str]) -> int:
    """Compare, and return 0."""
    if given[:1] in (["measured"], ["raced"], ["share"]):
        return _watched(given)
    if output.helped(given, _USAGE):
        return 0
    if given[:1] == ["--from"] or (given[:1] == ["--output"] and given[2:3] == ["--from"]):
        return _from([word for word in given if word != "--from"])
    has_script = run.names_script(given, ("--yes",))
    ours, script = run.split(given, ("--yes",)) if has_script else (given, [])
    asked, rest = words.take(ours, OWN)
    job = Job(rest, script, prog=_PROG, lacks="" if "--vary" in asked else "--vary")
    base = job.config(())
    varied = grid.axes(asked.get("--vary", [])) or _usual(base, rest, is_script=has_script)
    weak = scaling(asked.get("--scaling", "strong"))
    for key, values in varied.items():
        for value in values:
            job.check_value(grid.words(key, value))
    cells = grid.cells(varied, job.config, weak=weak, yes=asked.get("--yes", False))
    if "--vary" not in asked and sum(not each.why_not for each in cells) > 1:
        cells = [each for each in cells if not each.why_not]  # nobody has asked for those that cannot be
    elif sum(not each.why_not for each in cells) == 1:
        why = "; ".join(f"{each.name}: {each.why_not}" for each in cells if each.why_not)
        raise RequestError(
            f"One variant is left ({why}); " * bool(why)
            + "give two different values at least, as in --vary devices=1,2."
        )
    plan = rounds.Plan(
        budget_s=_seconds(asked.get("--budget", "2m")), width=0.02, steps=_whole("--steps", asked.get("--steps"))
    )
    aim = _aim(asked, base.seed, varied, is_script=has_script)
    folder = folder_of(base, "comparison", _plan(cells, job.shown(), plan))
    screen = Screen(stderr=True)
    _announce(screen, cells, plan, aim)
    disturbed = crowded(screen)
    with telling(screen) as tell:
        try:
            found = rounds.run(cells, job.command, folder, plan, tell, lambda tried: _estimate(screen, tried, aim))
            trained = whole.run(found, job.training, aim, tell)
        except KeyboardInterrupt:
            raise Stopped(
                f"Stopped on request; start the same command with --output {shown(folder)} to go on where it was."
            ) from None
        except OSError as error:
            raise folders.unwritable(folder, error) from error
    table = rows.rows(found, tolerance=asked.get("--tolerance"))
    table = [whole.row(row, trained[row.name], aim.to_accuracy) if trained.get(row.name) else row for row in table]
    told = answer.sentences(table, found, job.shown, trained, aim.to_accuracy)
    if any(row.samples_per_s and row.batch is None for row in table):
        told.append("Without a loader that the session has prepared nothing tells samples: samples/s are steps/s here.")
    told += [disturbed] if disturbed else []
    runs = {each.cell.name: records.curves(each.run, steps=each.timed_to) for each in found if each.races}
    accuracy = {name: whole.curve(mine) for name, mine in trained.items()}
    _tell(_made(f"{folders.default_name(base)}: ways to train", table, told, runs, accuracy), folder)
    return 0 if any(row.samples_per_s for row in table) else 1


def _from(given: list[str]) -> int:
    """Report on runs that have ended."""
    asked, leading = words.take(given, {"--output": str})
    report_of([Path(each) for each in leading], Path(asked["--output"]) if "--output" in asked else None)
    return 0


def report_of(given: Sequence[Path], folder: Path | None) -> Path:
    """Write and print a report on runs that have ended; return its page.

    Raises `RequestError` where there is no run, or they are of several jobs.
    """
    if not given:
        raise RequestError("There is no run to report on; give the folders of some that have ended.")
    runs = [past.load(each) for each in given]
    past.check_one_job(runs)
    folder = folder or folders.fresh("compared")
    try:
        own_folder(folder)
    except OSError as error:
        raise folders.unwritable(folder, error) from error
    table = past.rows(runs)
    fastest = max((row for row in table if row.samples_per_s), key=lambda row: row.samples_per_s or (), default=None)
    told = [
        "No run has a speed." if fastest is None else f"{fastest.name} was the fastest; each run was measured once."
    ]
    if len(batches := {row.batch for row in table if row.batch}) > 1:
        told.append(f"Their global batches differ ({', '.join(map(str, sorted(batches)))}): they are other models.")
    made = _made(f"{len(runs)} runs", table, told, {run.name: records.curves(run.folder) for run in runs})
    _tell(
        dataclasses.replace(made, about="Runs that have ended, each as its manifest.json tells.", is_past=True), folder
    )
    return folder / HTML


def _made(
    title: str,
    table: Sequence[Row],
    told: Sequence[str],
    curves: Mapping[str, tuple[list[float], list[tuple[float, float]]]],
    accuracy: Mapping[str, list[tuple[float, float]]] | None = None,
) -> Report:
    facts = hardware.survey(visible_gpus())
    gpus = Counter(gpu.name for gpu in facts.gpus)
    about = ", ".join([f"{facts.cpus} × {facts.cpu_name}", *(f"{count} × {name}" for name, count in gpus.items())])
    return Report(
        title=title,
        about=f"{about}; {', '.join(f'{name} {version_of(name)}' for name in ('lockstep-torch', 'torch'))}",
        made=f"Made {time.strftime('%Y-%m-%d %H:%M')} by: {shlex.join(['lockstep', *sys.argv[1:]])}",
        rows=table,
        answer=told,
        losses={name: each for name, (each, _) in curves.items()},
        busy={name: each for name, (_, each) in curves.items()},
        accuracy=accuracy or {},
    )


def _tell(report: Report, folder: Path) -> None:
    try:
        names = write(report, folder)
    except OSError as error:
        raise folders.unwritable(folder, error) from error
    with output.written():
        _print(Screen(), report, folder, names)


def _watched(given: list[str]) -> int:
    """Internal verb: run a command, watched as `how` says."""
    how, told, verb, *rest = [*given, "", "", ""][: max(3, len(given))]
    if verb not in ("run", "train") or (how != "raced" and not told.isdecimal()):
        raise RequestError(f"lockstep compare {how} takes a word, and the command to watch, run or train.")
    job: Callable[[RunConfig, World], Any] = entry
    if verb == "run":
        config, script = run.asked(rest, prog="lockstep run")
        job = _Ending(script)
    else:
        # What watches it ends it, after more steps than a short job has.
        config = dataclasses.replace(flags.parse(rest, prog="lockstep train"), epochs=_ENDLESS, max_steps=None)
    folders.check(config)
    end_with_parent()  # a comparison that is killed leaves none behind
    launchers.launch(Raced(job, told) if how == "raced" else _WATCHED[how](job, int(told)), config)
    return 0


@dataclasses.dataclass(frozen=True)
class _Ending:
    """A script as an entry for the launchers, which fails where it ends with an exit code of its own."""

    script: Script

    def __call__(self, config: RunConfig, world: World) -> None:
        code = self.script(config, world)
        if code:
            raise RunError(f"{self.script.name} has ended with exit code {code}; what it printed says why.")


def _usual(base: RunConfig, given: Sequence[str], *, is_script: bool) -> dict[str, list[str]]:
    """Return what is varied where nobody says. Raises `RequestError` where the flags leave nothing to vary."""
    facts, options = hardware.survey(visible_gpus()), flatten(base)
    gpus = 0 if base.parallel.accelerator == "cpu" else len(facts.gpus)
    asked = {word.partition("=")[0].removeprefix("--") for word in given} & {"strategy", "devices", "precision"}
    kept = {key: str(options[key]) for key in asked}
    found = grid.usual(facts.cpus, gpus, has_bf16=facts.has_bf16_units, is_script=is_script, given=kept)
    if not found:
        raise RequestError("There is one way to train this here: say what to compare, as in --vary batch=64,256.")
    return found


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        found = float(number) * _UNITS[unit]
    except ValueError:
        found = math.nan
    if not (found > 0 and math.isfinite(found)):
        raise RequestError(f"--budget {text}: give a time, such as 90s, 5m or 1h.")
    return found


def _whole(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise RequestError(f"{name} {text}: give a whole number of 1 or more.")
    return int(text)


def _aim(asked: Mapping[str, Any], seed: int, varied: Mapping[str, Any], *, is_script: bool) -> Aim:
    """Return which whole trainings are asked for; raises `RequestError` where they cannot be."""
    many, text = _whole("--seeds", asked.get("--seeds")), asked.get("--to-accuracy")
    if many is None and text is None:
        for key in sorted(varied.keys() & {"epochs", "max-steps"}):
            raise RequestError(f"--vary {key} changes no step: add --seeds N, which trains each variant whole.")
        return Aim(seeds=())
    if "seed" in varied:
        raise RequestError("--vary seed cannot be combined with whole trainings, which take --seeds anyway; drop one.")
    target = None
    if text is not None:
        with contextlib.suppress(ValueError):
            target = float(text)
        if target is None or not 0 < target <= 1:
            raise RequestError(f"--to-accuracy {text}: give a share above 0 and at most 1, such as 0.94.")
        if is_script:
            raise RequestError("--to-accuracy needs evaluations in the records, which a script has not; use --seeds.")
    return Aim(seeds=range(seed, seed + (many or _SEEDS)), to_accuracy=target)


def _plan(cells: Sequence[Cell], job: Sequence[str], plan: rounds.Plan) -> dict[str, Any]:
    """Return what a comparison that goes on has to share with what it has begun."""
    return {
        "job": [*job],
        "cells": [{"name": each.name, "flags": list(each.flags)} for each in cells],
        "steps": plan.steps,
        "machine": machine(),
    }


def _announce(screen: Screen, cells: Sequence[Cell], plan: rounds.Plan, aim: Aim) -> None:
    able = [each for each in cells if not each.why_not]
    screen.say(
        f"{counted(len(able), 'variant')}, in about {plan.budget_s:.0f} s: {', '.join(each.name for each in able)}"
    )
    if aim.seeds:
        until = "" if aim.to_accuracy is None else f", each until an evaluation has {100 * aim.to_accuracy:g}%"
        many = len(able) * len(aim.seeds)
        screen.say(f"then {many} whole trainings, {len(able)} variants × {counted(len(aim.seeds), 'seed')}{until}")
    for each in cells:
        if each.why_not:
            screen.say((f"left out: {each.name}: {each.why_not}", "bright_black"))


def _estimate(screen: Screen, tried: Sequence[Series], aim: Aim) -> None:
    """Say how long the whole trainings will take."""
    many, seconds = whole.left(tried, aim)
    if many:
        most = "" if aim.to_accuracy is None else "at most "
        long = f"{most}about {duration(seconds)} and evaluations" if seconds else "no loop tells how many steps it has"
        screen.say(f"{counted(many, 'whole training')} after the races: {long}")


def _print(screen: Screen, report: Report, folder: Path, names: Sequence[str]) -> None:
    titles = ("samples/s", "ratio", "efficiency", "step ms", "p95", *PARTS, "memory", "first step", "losses", "proved")
    columns = zip(*[[row.name, *_cells(row)] for row in report.rows], strict=True)
    told = zip(("variant", *titles), columns, strict=True)
    filled = {head: cells for head, cells in told if any(cell not in ("", "–") for cell in cells)}
    screen.table([*filled], zip(*filled.values(), strict=True))
    if trained := over_seeds(report.rows):
        screen.print()
        screen.table(["variant", *trained], zip(*[[row.name for row in report.rows], *trained.values()], strict=True))
    for row in report.rows:
        if row.failed:
            screen.say((f"{row.name}: {row.failed}", "dim"))
    screen.print()
    for sentence in report.answer:
        screen.say(sentence)
    screen.say((f"{', '.join(names)} in {shown(folder)}", "dim"))


def _cells(row: Row) -> list[str]:
    if row.samples_per_s is None or row.ratio is None:
        return ["–"] * (9 + len(PARTS))
    total_s = sum(row.parts_s.values())
    between = f" ({row.ratio.low:.2f}–{row.ratio.high:.2f})" if row.ratio.low else ""
    memory = row.device_memory_bytes or row.host_memory_bytes
    return [
        f"{row.samples_per_s.middle:,.0f}",
        f"{row.ratio.middle:.2f}{between}",
        "" if row.efficiency is None else f"{row.efficiency:.0%}",
        *("" if each is None else f"{1000 * each:.3g}" for each in (row.step_p50_s, row.step_p95_s)),
        *(f"{round(100 * row.parts_s[part] / total_s)}%" if total_s and row.tells(part) else "" for part in PARTS),
        "" if memory is None else f"{memory / 2**30:.2f} GiB",
        "" if row.to_first_step_s is None else f"{row.to_first_step_s:.1f} s",
        "" if row.loss_gap is None else "same" if row.loss_gap == 0 else f"{row.loss_gap:.1e}",
        row.proved,
    ]
