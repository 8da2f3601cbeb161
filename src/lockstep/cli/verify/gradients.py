"""`lockstep verify gradients [RECIPE] [flags]`: N ranks' gradients against one process's."""

from __future__ import annotations

import functools
import inspect
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import user_code
from ...audit import start as start_audit
from ...audit.measure import Audited
from ...audit.start import Process
from ...config.options import override
from ...config.registry import KINDS
from ...config.schema import RunConfig
from ...errors import ProofError, RequestError, counted, ranks_named
from ...launchers import start
from ...launchers.plan import LaunchPlan, plan
from ...record import checks
from ...record.checks import Check
from ...runs import folders
from ...screen import Screen
from ...verify.commands import python
from .. import audit, flags, output, run, variants
from ..preflight import check_names
from . import curve

if TYPE_CHECKING:
    from ...audit.judge import Verdict
    from ...verify.gradients import Answer, Report
    from ...world.world import World

_PROG = "lockstep verify gradients"
_SWITCHES = ("--all",)
_FLAGS = {"--tolerance": float, "--step": str, "--all": bool}
_ROWS = 5


def main(words: list[str]) -> int:
    """Measure, print the answer, and return 0. Raises `ProofError` where the gradients differ."""
    flag_words, script = run.split(words, _SWITCHES) if run.names_script(words, _SWITCHES) else (words, [])
    options, flag_words = flags.take(flag_words, _FLAGS, prog=_PROG)
    step = options.get("--step", "")
    if script:
        return _audit(options, flag_words, script)
    is_loop = bool(step and _takes_batch(step))
    if is_loop:
        words = [word.partition("=")[0] for word in (*flag_words, *options)]
        if idle := [name for name in ("--all", "--max-steps") if name in words]:
            raise RequestError(f"{idle[0]} has no use here: the first step of a loop is compared; leave it out.")
        flag_words = [*flag_words, "--step", step]
    config, flag_words = curve.parsed(flag_words, [], prog=_PROG)
    if is_loop:
        setup = curve.checked(override(config, max_steps=1), flag_words, [], name="gradients")
    else:
        check_names(config)
    from ...verify.gradients import strategies  # late: it imports torch
    from ...verify.workbench import TOLERANCE, TOLERANCES

    tolerance = options.get("--tolerance", TOLERANCES.get(config.precision.name, TOLERANCE))
    if is_loop:
        return curve.judge(setup, tolerance)
    recomputes = bool(config.precision.checkpoint_activations)  # on one device per process
    names = [name for name in strategies(config.parallel.strategy) if not (recomputes and KINDS[name].drives_all)]
    launch_plan = _plan(config, names)
    report = start.run(functools.partial(_entry, names=names, tolerance=tolerance, step=step), launch_plan)
    if report is None:
        return 0  # this process is not the rank that reports
    folder = config.record.output or folders.fresh(f"{folders.default_name(config)}-gradients")
    trouble = variants.add_checks(folder, [report.check()])
    with output.written():
        _print(Screen(), report, config, most=None if "--all" in options else _ROWS)
        note = f"warning: {trouble}" if trouble else f"written to {folder}: {checks.SHEET}, {checks.SUMMARY}"
        Screen().say((note, "yellow" if trouble else "dim"))
    if failing := [answer for answer in report.answers if answer.fails]:
        but = ": not the gradient of one process" if any(not answer.agrees for answer in failing) else ""
        location = "" if trouble else f" {folder / checks.SHEET} has the numbers."
        raise ProofError(f"{'; '.join(map(str, failing))}{but}.{location}")
    return 0


def _audit(options: Mapping[str, Any], flag_words: Sequence[str], script: Sequence[str]) -> int:
    """Audit a session's script on the flags of `lockstep run`."""
    words = [word.partition("=")[0] for word in (*flag_words, *options)]
    if idle := [name for name in ("--all", "--step", "--tolerance", "--max-steps") if name in words]:
        raise RequestError(f"{idle[0]} has no use here: the first steps of a script are audited; leave it out.")
    config, words = curve.parsed([*flag_words], script, prog=_PROG)
    setup = curve.checked(config, words, script, name="gradients")
    folder = config.record.output or folders.fresh(
        f"{Path(script[1] if script[0] == '-m' else script[0]).stem}-gradients"
    )
    begun_s = time.monotonic()

    def keep(verdict: Verdict) -> None:
        check = Check(
            name="gradients",
            claim=f"{verdict.ranks} ranks compute the gradients of one process on their samples together",
            outcome=Check.OPEN if verdict.refusal else Check.HOLDS if verdict.is_sound else Check.FAILS,
            times=verdict.steps,
            tolerance=f"{verdict.tolerance:g} relative",
            found="; ".join(finding.kind for finding in verdict.findings)
            or verdict.refusal
            or f"largest difference {verdict.largest_gap or 0.0:.1e}",
            cost_s=time.monotonic() - begun_s,
        )
        if trouble := variants.add_checks(folder, [check]):
            Screen().say((f"warning: {trouble}", "yellow"))

    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as scratch:

        def ranks(count: int) -> list[Process]:
            run_folder = tempfile.mkdtemp(dir=scratch)  # each start is a run
            return start_audit.ranks(python("lockstep", *setup.arguments, "--output", run_folder, *script), count)

        return audit.report(Audited(shlex.join(script), ranks, setup.devices), folder, keep)


def _takes_batch(step: str) -> bool:
    """Return whether a user's step is step(model, batch). As in `lockstep train`; else step(model, x, y)."""
    try:
        return len(inspect.signature(user_code.load("--step", step)).parameters) == 2
    except ValueError:  # not written in Python
        return False


def _plan(config: RunConfig, names: Sequence[str]) -> LaunchPlan:
    """Return the config to measure. It has the ranks' strategy, several devices, nothing for speed alone."""
    precision = "fp64" if config.precision.name == "auto" else config.precision.name
    strategy = next((name for name in names if KINDS[name].has_ranks), names[0])
    plain = {"compile": False, "cuda_graphs": "off", "channels_last": "off", "ema": None}
    config = override(config, precision=precision, strategy=strategy, **plain)
    launch_plan = plan(config)
    return plan(override(config, devices=variants.device_count(config))) if launch_plan.starts_here else launch_plan


def _entry(config: RunConfig, world: World, **options: Any) -> Report | None:
    from ...verify.gradients import examine

    return examine(config, world, **options)


def _print(screen: Screen, report: Report, config: RunConfig, *, most: int | None) -> None:
    screen.say(
        f"{config.data.name}, {config.model.name}, {report.precision}: {report.replicas} replicas against one process; "
        "largest relative difference of a gradient"
    )
    cells: dict[str, list[str]] = {}
    for answer in report.answers:
        for row in answer.rows:
            cells.setdefault(row.case, []).append(f"{row.gap:.1e}" + (" *" if row.tensors else ""))
    rows = [(case, *gaps) for case, gaps in cells.items()]
    screen.table(("", *(answer.strategy for answer in report.answers)), rows)
    for answer in report.answers:
        if not answer.agrees:
            _explain(screen, answer, report.tolerance, most)
    if not any(answer.fails for answer in report.answers):
        same = ", ".join(answer.strategy for answer in report.answers if answer.agrees)
        other = ", ".join(answer.strategy for answer in report.answers if not answer.agrees)
        screen.say(
            f"The same gradient within {report.tolerance:g}: {same}. " if same else "",
            f"Different by design, as explained above: {other}." if other else "",
        )


def _explain(screen: Screen, answer: Answer, tolerance: float, most: int | None) -> None:
    """Print a strategy's differences and their causes."""
    gaps: dict[str, float] = {}
    for row in answer.rows:
        gaps |= {name: max(gap, gaps.get(name, 0.0)) for name, gap in row.tensors.items()}
    screen.print()
    summary = f": {counted(len(gaps), 'tensor')} beyond {tolerance:g}" if gaps else ""
    screen.say((answer.strategy, "bold" if answer.fails else "yellow"), summary)
    rows = [
        (name, ", ".join(cause.name for cause in answer.causes if name in cause.tensors), f"{gap:.1e}")
        for name, gap in sorted(gaps.items(), key=lambda item: -item[1])[:most]
    ]
    if len(gaps) > len(rows):
        rows.append((f"… and {len(gaps) - len(rows)} more (--all)", "", ""))
    if rows:
        screen.table(("gradient of", "because of", "difference"), rows, texts=2)
    for name, reason in _reasons(answer):
        screen.say("  ", (name, "bold"), reason)


def _reasons(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield each reason's name, and the rest of its sentence."""
    from ...checkpoint.state import few  # late: it imports torch

    for cause in answer.causes:
        sizes = f"alone {max(cause.tensors.values(), default=0.0):.1e}, switched off {cause.residual:.1e}"
        yield cause.name, f": {cause.sentence} ({sizes})."
    if answer.differing:
        ranks = ranks_named(sorted(frozenset().union(*answer.differing.values())))
        yield "ranks differ", f": after the exchange {ranks} have other bits, in {few([*answer.differing], _ROWS)}."
    if answer.by_design:
        yield "", f"That is so by design: {answer.by_design}."
