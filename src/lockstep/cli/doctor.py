"""`lockstep doctor [flags]`: check that a job can run. Reports risks and slowdowns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby

from .. import hardware
from ..config.options import leaves
from ..config.schema import ParallelConfig, RecordConfig, RunConfig
from ..doctor.examine import Examination, Report
from ..doctor.finding import Finding
from ..errors import RequestError, RunError, counted
from ..launchers import start
from ..launchers.devices import visible_gpus
from ..printable import visible_json
from ..runs import folders
from ..screen import Screen
from . import flags, output

_STALL_S = 30.0
_OF_TRAINING = {"batchnorm"}
"""Options of the parallel section that concern neither devices nor rendezvous."""
_STYLES = {"green": "green", "yellow": "bold yellow", "red": "bold red", "unchecked": "dim"}
_MEANINGS = {
    "red": "no job can run here",
    "yellow": "a job can run; yellow findings cost speed or are a risk",
    "green": "a job can run",
}


def main(words: list[str]) -> int:
    """Examine, print the findings, and return 0. Raises `RunError` if no job can run."""
    options, flag_words = flags.take(words, {"--json": bool}, prog="lockstep doctor")
    base = RunConfig(parallel=ParallelConfig(stall_timeout=_STALL_S))
    config = flags.parse(flag_words, prog="lockstep doctor", base=base, imports=(), check=_check_flags)
    has_data = any(word.replace("_", "-").startswith("--data-dir") for word in flag_words)
    print_report = partial(_print, as_json="--json" in options, since_s=time.time())
    examination = Examination(
        output=(config.record.output or folders.RUNS).absolute(),
        data=config.data.dir.absolute() if has_data else None,
        chosen_cpu=config.parallel.accelerator == "cpu",
        print_report=print_report,
    )
    # Without --output, so that a failure leaves nothing in that folder.
    report = start.launch(examination, dataclasses.replace(_usable(config), record=RecordConfig()))
    if report is not None:  # else this process is not the rank that reports
        print_report(report)
    return 0


def _check_flags(names: Collection[str], config: RunConfig) -> None:
    useful = {leaf.key for leaf in leaves() if leaf.section == "parallel"} - _OF_TRAINING
    for key in names:
        if key not in useful | {"output", "data-dir", "config"}:
            raise RequestError(f"lockstep doctor has no use for --{key}: it trains nothing; leave it out.")


def _usable(config: RunConfig) -> RunConfig:
    """Return the config without GPUs that torch cannot use, so that the doctor reports them and continues."""
    parallel = dataclasses.replace(config.parallel, max_restarts=0)  # a rank that fails is a finding, too
    if parallel.accelerator == "auto" and (gpus := hardware.gpus(visible_gpus())):
        from ..doctor.gpus import find_obstacle  # late, and only where there are GPUs: torch takes seconds

        if find_obstacle(gpus):
            parallel = dataclasses.replace(parallel, accelerator="cpu", gpus="")
    return dataclasses.replace(config, parallel=parallel)


def _print(report: Report, *, as_json: bool, since_s: float) -> None:
    """Print the report of a command given at `since_s`. Raises `RunError` if no job can run."""
    took_s = time.time() - since_s
    with contextlib.suppress(BrokenPipeError), output.written():
        if as_json:
            about = {"verdict": verdict(report.findings), "ranks": len(report.hosts), "seconds": round(took_s, 3)}
            print(visible_json(json.dumps(about | dataclasses.asdict(report), indent=2)))
        else:
            show(report.findings, report.hosts, report.accelerator, took_s)
    if red := [finding.name for finding in report.findings if finding.state == "red"]:
        summary = f"{counted(len(red), 'red finding')} ({', '.join(dict.fromkeys(red))})"
        raise RunError(f"No job can run here: {summary}; each has its fix beside it.")


def show(findings: Sequence[Finding], hosts: Sequence[str], accelerator: str, took_s: float) -> None:
    """Print the findings by group, and the verdict."""
    screen, is_several = Screen(), len(set(hosts)) > 1
    place = counted(len(set(hosts)), "host") if is_several else hosts[0]
    screen.say((f"{counted(len(hosts), 'rank')} on {place}, {accelerator}", "dim"))
    for group, members in groupby(findings, key=lambda finding: finding.group):
        screen.say((group, "bold"))
        for finding in members:
            names = list(dict.fromkeys(hosts[rank] for rank in finding.ranks)) if is_several else []
            note = f" (on {', '.join(names[:3])}{' …' * bool(names[3:])})" if names else ""
            state = (f"  {finding.state:<9}", _STYLES[finding.state])
            screen.say(state, f" {finding.name:<18} {finding.words}", (note, "dim"))
            if finding.fix:
                screen.say(" " * 31, ("fix: ", "bold"), finding.fix)
    worst = verdict(findings)
    screen.say((worst, _STYLES[worst]), f": {_MEANINGS[worst]} ({took_s:.1f} s)")


def verdict(findings: Sequence[Finding]) -> str:
    """Return the findings' worst state; red if no job can run."""
    states = {finding.state for finding in findings}
    return next(state for state in _MEANINGS if state in states or state == "green")
