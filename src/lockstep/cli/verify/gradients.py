"""`lockstep verify gradients [RECIPE] [flags]`: N ranks' gradients against one process's, and why they differ."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table

from ... import folders, own, proof
from ...config import RunConfig
from ...errors import ProofError, RequestError, counted, ranks_named
from ...kinds import KINDS
from ...launchers import table as launchers
from ...options import override
from ...screen import Part, Screen, line
from .. import flags, output, run, words
from ..train import preflight
from . import curve, devices, kept

if TYPE_CHECKING:
    from ...prove.answer import Answer, Report
    from ...world import World

_USAGE = """\
usage: lockstep verify gradients [RECIPE] [--tolerance T] [--step MODULE:ATTRIBUTE] [--all] [flags of lockstep train]
       lockstep verify gradients [--tolerance T] [flags of lockstep run] SCRIPT [its own flags], or -m MODULE

Computes the gradient of the same global batches (the first of an epoch, an uneven one, one in micro-batches) in one
process and with --devices N under each strategy, or the one that --strategy names, in float64. Where they are not the
same, everything that can be is switched off on both sides and let back in one by one, so that each cause is measured.
(hybrid is measured where --strategy names it; its ranks are started by torchrun or by hand.)

A script (NAME.py: a loop over lockstep.session()) is run up to its first optimizer step in one process, on --devices N
ranks, and in micro-batches, and the gradients that its optimizers get are compared, by parameter. A --step that is
called as step(model, batch), with data of any kind, is judged so too. Causes are then not looked for.

  --tolerance T   largest relative difference (default: 1e-9 in float64, 1e-4 in other precisions)
  --step M:A      a training step of your own instead of ours: called as step(model, x, y), it runs forward and
                  backward and leaves gradients in the model's parameters, as your loop does between zero_grad and step
  --all           print all tensors beyond the tolerance, not the first 5 of a strategy
  --output FOLDER writes the answer into this folder's proof.md and summary.json; it can be a run's
                  (default: runs/DATA-MODEL-gradients)

lockstep train --help lists the other flags, of which --model, --data, --batch, --devices, --batchnorm and --precision
matter most. Exit code: 0 the same gradient, 3 another one, 2 where it cannot be measured.
"""
_SWITCHES = ("--all",)
_OWN = {"--tolerance": float, "--step": str, "--all": bool}
_ROWS = 5
_WIDE = 160
"""Columns where the output is no terminal: names stay whole for whoever searches them."""


@dataclass(frozen=True)
class _Asked:
    strategies: tuple[str, ...]
    tolerance: float
    step: str


def main(given: list[str]) -> int:
    """Measure, print the answer, and return 0; raise `ProofError` where the gradients are not the same."""
    if output.helped(given, _USAGE):
        return 0
    ours, script = run.split(given, _SWITCHES) if run.names_script(given, _SWITCHES) else (given, [])
    own_flags, rest = words.take(ours, _OWN)
    step = own_flags.get("--step", "")
    if script or (step and _takes_batch(step)):
        return _of_loop(own_flags, [*rest, *(("--step", step) if step else ())], script)
    config = flags.parse(rest, prog="lockstep verify gradients")
    # A recipe's precision is for training.
    config = _prepared(config, keeps_precision=any(word.partition("=")[0] == "--precision" for word in rest))
    preflight(config)
    from ...prove import float64  # late: it imports torch

    name = config.precision.name
    tolerance = own_flags.get("--tolerance", float64.TOLERANCES.get(name, float64.TOLERANCE))
    from ...prove.answer import strategies

    names = strategies(config.parallel.strategy)
    config = _placed(config, names)
    report = launchers.launch(functools.partial(_entry, asked=_Asked(tuple(names), tolerance, step)), config)
    if report is None:
        return 0  # this process is another rank than the one that tells
    _print(report, config, everything="--all" in own_flags)
    folder = _kept(config, report)
    if failing := [each for each in report.answers if each.fails]:
        raise ProofError(_sentence(failing, folder))
    return 0


def _takes_batch(step: str) -> bool:
    """Whether a step of the user's own is one of `lockstep train`: step(model, batch), and not step(model, x, y)."""
    try:
        return len(inspect.signature(own.load("--step", step)).parameters) == 2
    except ValueError:  # of what is not written in Python
        return False


def _of_loop(own_flags: Mapping[str, Any], rest: list[str], script: list[str]) -> int:
    """Compare the first gradients of a loop over a session; return 0, or raise `ProofError`."""
    if "--all" in own_flags:
        raise RequestError(
            "--all lists the tensors of a recipe's strategies; of a loop's, the one that differs most is told."
        )
    names = [word.partition("=")[0] for word in rest]
    if "--precision" not in names:
        rest = [*rest, "--precision", "fp64"]
    if "--max-steps" in names:
        raise RequestError("--max-steps has no use here: the first step's gradients are compared; leave it out.")
    prog = "lockstep verify gradients"
    config = run.asked([*rest, *script], prog=prog)[0] if script else flags.parse(rest, prog=prog)
    config = override(config, max_steps=1)
    from ...prove import float64  # late: it imports torch

    name = config.precision.name
    tolerance = own_flags.get("--tolerance", float64.TOLERANCES.get(name, float64.TOLERANCE))
    return curve.judge(curve.checked(config, rest, script, first_step=True), tolerance)


def _prepared(config: RunConfig, *, keeps_precision: bool) -> RunConfig:
    """Return the config to measure with: float64 unless asked otherwise, and nothing that only speed is for."""
    name = config.precision.name if keeps_precision and config.precision.name != "auto" else "fp64"
    precision = dataclasses.replace(config.precision, name=name, compile=False, channels_last="off")
    return dataclasses.replace(config, precision=precision, optim=dataclasses.replace(config.optim, ema=None))


def _placed(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """Return the config with the strategy that the ranks use, and a number of devices.

    Raises `RequestError` where there is but one device.
    """
    with_ranks = [name for name in names if KINDS[name].has_ranks]
    parallel = dataclasses.replace(config.parallel, strategy=(with_ranks or list(names))[0])
    config = dataclasses.replace(config, parallel=parallel)
    if launchers.starts_here(config):
        config = dataclasses.replace(config, parallel=dataclasses.replace(parallel, devices=devices.several(config)))
    launchers.least_ranks(config)
    return config


def _entry(config: RunConfig, world: World, asked: _Asked) -> Report | None:
    from ...prove.answer import examine

    output.survive()  # a rank is a process of its own
    return examine(config, world, list(asked.strategies), asked.tolerance, asked.step)


def _print(report: Report, config: RunConfig, *, everything: bool) -> None:
    with output.written():
        screen = Screen()
        if not screen.is_terminal:
            screen.width = _WIDE
        _tell(
            screen,
            f"{config.data.name}, {config.model.name}, {report.precision}: {report.replicas} replicas "
            "against one process; largest relative difference of a gradient",
        )
        screen.print(_overview(report))
        for answer in report.answers:
            _explain(screen, answer, report.tolerance, most=None if everything else _ROWS)
        if not any(each.fails for each in report.answers):
            _conclude(screen, report)


def _conclude(screen: Screen, report: Report) -> None:
    same = [each.strategy for each in report.answers if each.agrees]
    other = [each.strategy for each in report.answers if not each.agrees]
    parts: list[Part] = []
    if same:
        parts = [("The same gradient", "bold"), f" within {report.tolerance:g}: {', '.join(same)}. "]
    _tell(screen, *parts, f"Another one by design, as said above: {', '.join(other)}." if other else "")


def _overview(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for answer in report.answers:
        table.add_column(answer.strategy, justify="right")
    cases = {row.case: row.split for answer in report.answers for row in answer.rows}
    for case, split in cases.items():
        cells = [
            next((f"{row.gap:.1e}" + (" *" if row.tensors else "") for row in answer.rows if row.case == case), "")
            for answer in report.answers
        ]
        table.add_row(line(f"{case}, {split}"), *cells)
    return table


def _explain(screen: Screen, answer: Answer, tolerance: float, *, most: int | None) -> None:
    """Print what differs under a strategy, and why."""
    if answer.agrees:
        return
    screen.print()
    style = "bold" if answer.fails else "yellow"
    tensors = {name for row in answer.rows for name in row.tensors}
    where = f": {counted(len(tensors), 'tensor')} beyond {tolerance:g}" if tensors else ""
    _tell(screen, (answer.strategy, style), where)
    if tensors:
        screen.print(_table(answer, most))
    for name, said in _reasons(answer):
        _tell(screen, (name, "bold"), said, indent=2)


def _reasons(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield what is known of the reasons: the name of each, and what completes it to a sentence."""
    for cause in answer.causes:
        sizes = f"alone {max(cause.tensors.values(), default=0.0):.1e}, switched off {cause.rest:.1e}"
        yield cause.name, f": {cause.sentence} ({sizes})."
    if answer.unused:
        yield (
            "unused parameters",
            f": the loss does not reach {_first(answer.unused)} on some rank, and training "
            "refuses that; freeze them, use them, or pass --find-unused, as was done to measure.",
        )
    if answer.unlike:
        ranks = sorted(frozenset().union(*answer.unlike.values()))
        hold = "holds other bits than the rest" if len(ranks) == 1 else "hold bits of their own"
        yield "ranks differ", f": after the exchange {ranks_named(ranks)} {hold}, in {_first([*answer.unlike])}."
    if answer.by_design:
        yield "", f"That is so by design: {answer.by_design}."


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _ROWS} more" if len(names) > _ROWS else ""
    return ", ".join(names[:_ROWS]) + more


def _tell(screen: Screen, *parts: Part, indent: int = 0) -> None:
    """Print a sentence: between words on a terminal, elsewhere as one line, for whoever searches it."""
    if screen.is_terminal:
        screen.print(Padding(line(*parts), (0, 0, 0, indent)))
    else:
        screen.say(" " * indent, *parts)


def _table(answer: Answer, most: int | None) -> Table:
    """Return the tensors beyond the tolerance: the largest gap in any case, and the causes that touch each."""
    gaps: dict[str, float] = {}
    for row in answer.rows:
        for name, gap in row.tensors.items():
            gaps[name] = max(gap, gaps.get(name, 0.0))
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    table.add_column("gradient of")
    table.add_column("difference", justify="right")
    table.add_column("because of")
    ordered = sorted(gaps.items(), key=lambda each: -each[1])
    most = most if most is None or len(ordered) > most + 1 else None  # a line that says "1 more" is no shorter
    for name, gap in ordered[:most]:
        why = [cause.name for cause in answer.causes if name in cause.tensors]
        table.add_row(line(name), f"{gap:.1e}", line(", ".join(why)))
    if most is not None and len(ordered) > most:
        table.add_row(line((f"… and {len(ordered) - most} more (--all)", "dim")), "", "")
    return table


def _kept(config: RunConfig, report: Report) -> str:
    """Write the answer into the output folder's proof; return where, as a sentence; "" if it cannot be."""
    folder = config.record.output or folders.fresh(f"{folders.default_name(config)}-gradients")
    trouble = kept.unwritten(folder, [report.check()])
    with output.written():
        if trouble:
            Screen().say((f"warning: {trouble}", "yellow"))
            return ""
        Screen().say((f"written to {folder}: {proof.SHEET}, {proof.SUMMARY}", "dim"))
    return f" {folder / proof.SHEET} has the numbers."


def _sentence(failing: Sequence[Answer], kept: str) -> str:
    from ...prove.answer import in_words

    but = ": not the gradient of one process" if any(each.differs for each in failing) else ""
    return f"{'; '.join(in_words(each) for each in failing)}{but}.{kept}"
