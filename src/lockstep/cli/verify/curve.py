"""`lockstep verify curve [RECIPE | SCRIPT] [flags]`: short runs of variants, compared."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ...config.options import flatten, override
from ...config.registry import KINDS
from ...config.schema import ParallelConfig, RunConfig
from ...errors import ProofError, RequestError, RunError
from ...files import check_own
from ...launchers.plan import plan
from ...record import checks
from ...record.checks import Check
from ...runs import folders
from ...screen import Screen
from ...verify import curve
from ...verify.curve import Outcome
from ...verify.variants import Setup
from .. import flags, output, run, variants
from ..preflight import check

_PROG = "lockstep verify curve"
_STEPS = 20
_OF_RANKS = ("resume", "rank", "world-size", "init-method", "launcher", "nodes")
"""Options of the start of a single run, which the variants set."""
_VARIED = ("devices", "gpus", "strategy", "output", "max-steps")
"""Flags that each variant sets or drops."""
_RUN_FILES = ("manifest.json", "*/manifest.json", "summary.json", "checkpoints")
"""Files in the folder of a run, or of another proof's runs."""
_SAME = {"curve": "model", "gradients": "gradient"}


def main(words: list[str]) -> int:
    """Train and compare; return 0 if all variants agree. Raises `ProofError` if not."""
    flag_words, script = run.split(words) if run.names_script(words) else (words, [])
    options, flag_words = flags.take(flag_words, {"--tolerance": float}, prog=_PROG)
    config, flag_words = parsed(flag_words, script, prog=_PROG)
    config = override(config, max_steps=config.max_steps or _STEPS)
    return judge(checked(config, flag_words, script), options.get("--tolerance", curve.default_tolerance(config)))


def parsed(flag_words: list[str], script: Sequence[str], *, prog: str) -> tuple[RunConfig, list[str]]:
    """Return the config of flags and a script, and the flags. The default precision is float64."""
    if not any(word.partition("=")[0] == "--precision" for word in flag_words):
        flag_words = [*flag_words, "--precision", "fp64"]  # a recipe's precision is for training
    return run.parse([*flag_words, *script], prog=prog)[0] if script else flags.parse(flag_words, prog=prog), flag_words


def checked(config: RunConfig, flag_words: list[str], script: Sequence[str], *, name: str = "curve") -> Setup:
    """Return the variants' common setup, without a folder yet. Raises `RequestError` for an impossible request."""
    options, defaults, parallel = flatten(config), flatten(RunConfig()), config.parallel
    for key in _OF_RANKS:
        if options[key] != defaults[key]:
            raise RequestError(
                f"lockstep verify {name} has no use for --{key} {options[key]}: it starts the runs of all variants "
                "itself, and continues some; leave it out."
            )
    kind = KINDS.get(parallel.strategy)
    if kind is not None and kind.has_two_levels:
        raise RequestError(
            f"--strategy {parallel.strategy} needs several nodes, which are started by hand; lockstep verify gradients "
            "measures it."
        )
    if kind is not None and not (kind.has_ranks or kind.drives_all):
        raise RequestError(f"--strategy {parallel.strategy} is what the others are compared with; leave it out.")
    alone = dataclasses.replace(config, parallel=ParallelConfig(accelerator=parallel.accelerator))
    if not plan(alone).starts_here:
        raise RequestError(
            f"lockstep verify {name} starts all ranks itself, and this process is a rank by its environment; start the "
            "command once, without torchrun, or, if the variables are left over: unset RANK WORLD_SIZE LOCAL_RANK."
        )
    count = variants.device_count(config)
    (plan if script else check)(override(config, devices=count))
    return Setup(
        config=config,
        folder=Path(),
        devices=count,
        is_cpu=variants.gpus(config) == 0,
        arguments=("run" if script else "train", *flags.without(flag_words, _VARIED)),
        script=tuple(script),
        name=name,
    )


def judge(request: Setup, tolerance: float) -> int:
    """Run and compare all variants; return 0 if they agree. Raises `ProofError` if not.

    Raises `RequestError` if none can be compared.
    """
    setup = dataclasses.replace(request, folder=_folder(request))
    begun_s, screen, outcomes = time.monotonic(), Screen(stderr=True), list[Outcome]()
    for outcome in curve.outcomes(setup, tolerance=tolerance):
        outcomes.append(outcome)
        note = f", {outcome.why_not}" if outcome.why_not else ""
        if outcome.parting:
            tensors = curve.TENSORS[setup.name]
            note += f", losses {curve.size(outcome.parting.loss)}, {tensors} {curve.size(outcome.parting.weight)}"
        screen.say(f"{outcome.variant.name}: {outcome.verdict}{note} ({outcome.seconds:.1f} s)")
    check = curve.check(setup.name, outcomes, tolerance, setup.config.precision.name, time.monotonic() - begun_s)
    _keep(setup.folder, check, outcomes)
    with output.written():
        _print(Screen(), outcomes, setup, tolerance)
        if check.outcome == Check.HOLDS:
            Screen().say(f"The same {_SAME[setup.name]}: {check.found}.")
    if check.outcome == Check.OPEN:
        reason = next(outcome.why_not for outcome in outcomes if outcome.why_not)
        raise RequestError(f"Nothing could be compared: {reason}; give fewer --devices, or a larger batch.")
    if check.fails:
        raise ProofError(
            f"The variants do not have the same {_SAME[setup.name]}: {check.found}; the runs are in {setup.folder}."
        )
    return 0


def _folder(setup: Setup) -> Path:
    """Return the folder for the runs; make a new one."""
    path = setup.config.record.output
    if path is not None and path.is_dir() and any(next(path.glob(pattern), None) for pattern in _RUN_FILES):
        raise RequestError(f"--output {path} holds a run already; give another folder.")
    try:
        path = path or folders.fresh(f"{folders.default_name(setup.config)}-{setup.name}")
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():  # an entry with a variant's name may be a link to another folder
            check_own(entry)
    except OSError as error:
        raise folders.unwritable(path, error) from error
    return path


def _keep(folder: Path, check: Check, outcomes: Sequence[Outcome]) -> None:
    """Write the proof into the folder, with each variant's commands and numbers."""
    rows = [
        {
            "name": outcome.variant.name,
            "compared_with": outcome.variant.partner or None,
            "verdict": outcome.verdict,
            "note": outcome.why_not,
            "same_bits_required": outcome.variant.same_bits,
            **({} if outcome.parting is None else dataclasses.asdict(outcome.parting)),
            "seconds": outcome.seconds,
            "commands": [shlex.join(command) for command in outcome.variant.commands],
        }
        for outcome in outcomes
    ]
    try:
        checks.add(folder, [check], variants=rows)
    except OSError as error:
        raise RunError(f"The proof cannot be written to {folder}: {error.strerror}; {check.found}.") from error


def _print(screen: Screen, outcomes: Sequence[Outcome], setup: Setup, tolerance: float) -> None:
    rows, notes = [], dict[str, list[str]]()
    for outcome in outcomes:
        parting, cells = outcome.parting, ["", "", ""]
        if parting is not None:
            cells = [curve.size(parting.loss), curve.size(parting.weight), parting.place]
        rows.append((outcome.variant.name, outcome.variant.partner, *cells, outcome.verdict))
        if outcome.why_not:
            notes.setdefault(outcome.why_not, []).append(outcome.variant.name)
    screen.table(("variant", "compared with", "losses", curve.TENSORS[setup.name], "begins", ""), rows, texts=2)
    for note, names in notes.items():
        screen.say((f"{', '.join(names)}: {note}", "dim"))
    limits = f"precision {setup.config.precision.name}, tolerance {tolerance:g} of the largest value"
    screen.say((f"{limits}; 0 where the same bits are due; commands and runs in {setup.folder}", "dim"))
    by_name = {outcome.variant.name: outcome.variant for outcome in outcomes}
    for outcome in (outcome for outcome in outcomes if outcome.verdict == curve.PARTS):
        screen.print()
        screen.say(outcome.sentence(curve.TENSORS[setup.name]))
        for command in (*by_name[outcome.variant.partner].commands, *outcome.variant.commands):
            screen.say(f"  {shlex.join(command)}")
