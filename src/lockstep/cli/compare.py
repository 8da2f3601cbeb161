"""`lockstep compare`: variants of one job, measured side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import hardware
from ..compare import answer, grid, measured, records, report, rounds, rows, tables
from ..compare.grid import Cell
from ..compare.report import COVERS_PAST, Report
from ..compare.rounds import Plan
from ..config.options import flatten
from ..config.schema import RunConfig
from ..errors import RequestError, RunError, counted
from ..files import own_folder, shown, understanding
from ..launchers import start
from ..runs import folders
from ..screen import Screen
from ..sessions.hooks import Hooks
from ..sessions.script import Script
from ..versions import version_of
from . import flags, output, run
from .train import entry
from .variants import Job, advice_on_failure, gpus, machine, notifier, provenance, warn_of_load, whole_number

if TYPE_CHECKING:
    from ..world.world import World

FLAGS: dict[str, type] = {
    "--vary": list,
    **dict.fromkeys(("--budget", "--seeds", "--scaling", "--steps"), str),
    **dict.fromkeys(("--to-accuracy", "--tolerance"), float),
}
_SEEDS = 3
_ENDLESS = 10**6
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_MEASUREMENTS: dict[str, Any] = {
    "measured": measured.measure,
    "measured-as-is": partial(measured.measure, draws=""),
    "share": measured.measure_share,
    "raced": measured.race,
}


def main(words: list[str]) -> int:
    """Compare, and return 0."""
    if words and words[0] in _MEASUREMENTS:
        return _measure(*words)
    options, leading = flags.take(words, {"--output": str}, prog="lockstep compare") if "--from" in words else ({}, [])
    if leading[:1] == ["--from"]:
        runs = [Path(word) for word in leading if word != "--from"]
        _report_past(runs, Path(options["--output"]) if "--output" in options else None)
        return 0
    job = Job(words, FLAGS, prog="lockstep compare")
    options, base = job.options, job.config()
    varied = grid.axes(options.get("--vary", [])) or _default_axes(job, base)
    for key, values in varied.items():
        for value in values:
            job.check_value(key, value)
    cells = grid.cells(varied, job.config, is_weak=job.is_weak)
    left_out = [cell for cell in cells if cell.why_not]
    if len(left_out) == len(cells) - 1:
        reasons = "; ".join(f"{cell.name}: {cell.why_not}" for cell in left_out)
        raise RequestError(
            f"One variant is left ({reasons}); " * bool(reasons)
            + "give two different values at least, as in --vary devices=1,2."
        )
    if "--vary" not in options:
        cells = [cell for cell in cells if not cell.why_not]  # drop defaults that cannot run
    steps = whole_number("--steps", options.get("--steps"))
    seeds, target = _trainings(options, base.seed, varied, is_script=job.is_script)
    plan = Plan(_seconds(options.get("--budget", "2m")), steps, seeds, target)
    rounds.check_budget(plan, sum(not cell.why_not for cell in cells))
    variants = [{"name": cell.name, "flags": list(cell.flags)} for cell in cells]
    folder = job.folder("comparison", {"cells": variants, "steps": steps})
    screen = Screen(stderr=True)
    _announce(screen, cells, plan)
    disturbed = warn_of_load(screen)
    with notifier(screen) as notify, advice_on_failure(folder):
        series = rounds.run(cells, job.command, folder, plan, notify)
        rounds.train(series, job.training, plan, notify)
    table = rows.of_series(series, tolerance=options.get("--tolerance"), target=target)
    sentences = answer.sentences(table, job.shown, target)
    if any(row.samples_per_s and row.batch is None for row in table):
        sentences.append("Without a loader that the session prepared, samples are unknown: samples/s are steps/s here.")
    sentences += [disturbed] if disturbed else []
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("lockstep-torch", "torch"))
    title, about = f"{folders.default_name(base)}: ways to train", f"{machine()}; {versions}"
    _write(Report(title=title, about=about, provenance=provenance(), rows=table, answer=sentences), folder)
    return 0 if any(row.samples_per_s for row in table) else 1


def _report_past(paths: Sequence[Path], folder: Path | None) -> None:
    """Write and print a report on ended runs. Raises `RequestError` without runs, or for several jobs."""
    if not paths:
        raise RequestError("There is no run to report on; give the folders of some that have ended.")
    runs = [records.load(path) for path in paths]
    records.check_one_job(runs)
    with understanding(Path("what these runs have recorded")):
        table = rows.of_runs(runs)
    folder = folder or folders.fresh("compared")
    rates = {row.name: row.samples_per_s.middle for row in table if row.samples_per_s}
    fastest = f"{max(rates, key=lambda name: rates[name])} was the fastest" if rates else "No run has a speed"
    sentences = [f"{fastest}; each run was measured once."]
    if len(batches := sorted({row.batch for row in table if row.batch})) > 1:
        sentences.append(f"Their global batches differ ({', '.join(map(str, batches))}): they are other models.")
    title, about = counted(len(runs), "run"), "Ended runs, as described by their manifest.json."
    past = Report(title=title, about=about, provenance=provenance(), rows=table, answer=sentences, covers=COVERS_PAST)
    _write(past, folder)


def _write(comparison: Report, folder: Path) -> None:
    with advice_on_failure(folder):
        own_folder(folder)
        names = report.write(comparison, folder)
    screen = Screen()
    with output.written():
        for columns in report.tables_of(comparison).values():
            screen.table([column.head for column in columns], tables.cells(columns, comparison.measured))
            screen.print()
        for row in comparison.rows:
            if row.failed:
                screen.say((f"{row.name}: {row.failed}", "dim"))
        for sentence in comparison.answer:
            screen.say(sentence)
        screen.say((f"{', '.join(names)} in {shown(folder)}", "dim"))


def _measure(mode: str, argument: str = "", verb: str = "", *words: str) -> int:
    """Run a command and measure it, by the internal verb `mode`."""
    if verb not in ("run", "train") or (mode != "raced" and not argument.isdecimal()):
        raise RequestError(f"lockstep compare {mode} takes a word, and the command to measure, run or train.")
    job: measured.Job = entry
    if verb == "run":
        config, script = run.parse([*words], prog="lockstep run")
        job = partial(_run_script, script)
    else:
        # The measurement ends the job, perhaps after more steps than a short job has.
        config = dataclasses.replace(flags.parse([*words], prog="lockstep train"), epochs=_ENDLESS, max_steps=None)
    folders.check(config)
    start.launch(partial(_MEASUREMENTS[mode], job, argument if mode == "raced" else int(argument)), config)
    return 0


def _run_script(script: Script, config: RunConfig, world: World, hooks: Hooks) -> None:
    """Run a script. Raises `RunError` if its exit code is not 0."""
    if code := script(config, world, hooks):
        raise RunError(f"{script.name} has ended with exit code {code}; its output says why.")


def _default_axes(job: Job, base: RunConfig) -> dict[str, list[str]]:
    """Return the options to vary by default. Raises `RequestError` if there are none."""
    options, cpus, has_bf16 = flatten(base), hardware.cpus(), bool(hardware.bf16_units())
    names = {word.partition("=")[0].removeprefix("--") for word in job.words}
    fixed = {key: str(options[key]) for key in names & {"strategy", "devices", "precision"}}
    axes = grid.defaults(cpus, gpus(base), has_bf16=has_bf16, is_script=job.is_script, job=fixed)
    if not axes:
        raise RequestError("Only one variant is possible here; pass --vary, as in --vary batch=64,256.")
    return axes


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(number) * _UNITS[unit]) < math.inf:
            return seconds
    raise RequestError(f"--budget {text}: give a time, such as 90s, 5m or 1h.")


def _trainings(
    options: Mapping[str, Any], seed: int, varied: Mapping[str, Any], *, is_script: bool
) -> tuple[Sequence[int], float | None]:
    """Return the seeds of whole trainings, and the accuracy that ends each. Raises `RequestError`."""
    count, target = whole_number("--seeds", options.get("--seeds")), options.get("--to-accuracy")
    if count is None and target is None:
        for key in sorted(varied.keys() & {"epochs", "max-steps"}):
            raise RequestError(f"--vary {key} changes no step: add --seeds N, which trains each variant whole.")
        return (), None
    if "seed" in varied:
        raise RequestError("--vary seed cannot be combined with whole trainings, which take --seeds anyway; drop one.")
    if target is not None and not 0 < target <= 1:
        raise RequestError(f"--to-accuracy {target:g}: give a share above 0 and at most 1, such as 0.94.")
    if target is not None and is_script:
        raise RequestError("--to-accuracy needs evaluations in the records, which a script has not; use --seeds.")
    return range(seed, seed + (count or _SEEDS)), target


def _announce(screen: Screen, cells: Sequence[Cell], plan: Plan) -> None:
    working = [cell for cell in cells if not cell.why_not]
    names = ", ".join(cell.name for cell in working)
    screen.say(f"{counted(len(working), 'variant')}, in about {plan.budget_s:.0f} s: {names}")
    if plan.seeds:
        until = "" if plan.to_accuracy is None else f", each until an evaluation has {100 * plan.to_accuracy:g}%"
        count = len(working) * len(plan.seeds)
        screen.say(f"then {count} whole trainings, {len(working)} variants × {counted(len(plan.seeds), 'seed')}{until}")
    for cell in cells:
        if cell.why_not:
            screen.say((f"left out: {cell.name}: {cell.why_not}", "bright_black"))
