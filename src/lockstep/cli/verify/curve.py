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

USAGE = """\
usage: lockstep verify curve [RECIPE] [--tolerance T] [flags of lockstep train]
       lockstep verify curve [--tolerance T] [flags of lockstep run] SCRIPT [its own flags], or -m MODULE

Trains the same few steps on one device and in all other ways: with dp and ddp on --devices devices (default: all GPUs,
or 2 CPU processes), on one more rank, with accumulation, with ranks started by torchrun and by hand, and stopped in the
middle and resumed. Prints how far losses and weights differ, and from which step.

A script (NAME.py: a loop over lockstep.session()) runs in the same ways, with one device per process; so does --step.
In float64, the script must create its tensors in the model's type; --precision fp32 does not need that.

Each run is a separate command; commands, logs and runs are in the output folder, with proof.md and summary.json.

  --tolerance T    largest relative difference (default: 1e-9 in fp64, 1e-3 in other precisions)
  --precision P    default: fp64
  --max-steps N    default: 20; learning rates follow --epochs
  --strategy S     compare only this strategy with one device
  --output FOLDER  default: runs/DATA-MODEL-curve

lockstep train --help and lockstep run --help list the other flags.

Exit code: 0 all agree, 3 some differ, 2 the request cannot be honoured.
"""
_PROG = "lockstep verify curve"
_STEPS = 20
_OF_RANKS = ("resume", "rank", "world-size", "init-method", "launcher", "nodes")
"""Options of how one run starts: the variants set them."""
_VARIED = ("devices", "gpus", "strategy", "output", "max-steps")
"""Flags that a variant has of its own, or not at all."""
_HELD = ("manifest.json", "*/manifest.json", "summary.json", "checkpoints")
"""Files of a folder that holds a run, or the runs of another proof."""
_SAME = {"curve": "model", "gradients": "gradient"}


def main(given: list[str]) -> int:
    """Train and compare; return 0 where all variants agree. Raises `ProofError` where they do not."""
    ours, script = run.split(given) if run.names_script(given) else (given, [])
    asked, rest = flags.take(ours, {"--tolerance": float}, prog=_PROG)
    config, rest = parsed(rest, script, prog=_PROG)
    config = override(config, max_steps=config.max_steps or _STEPS)
    return judge(checked(config, rest, script), asked.get("--tolerance", curve.default_tolerance(config)))


def parsed(given: list[str], script: Sequence[str], *, prog: str) -> tuple[RunConfig, list[str]]:
    """Return the config of flags and a script, and the flags. The default precision is float64."""
    if not any(word.partition("=")[0] == "--precision" for word in given):
        given = [*given, "--precision", "fp64"]  # a recipe's is for training
    return run.parse([*given, *script], prog=prog)[0] if script else flags.parse(given, prog=prog), given


def checked(config: RunConfig, given: list[str], script: Sequence[str], *, name: str = "curve") -> Setup:
    """Return the variants' common setup, without a folder yet. Raises `RequestError` for an impossible request."""
    asks, usual, asked = flatten(config), flatten(RunConfig()), config.parallel
    for key in _OF_RANKS:
        if asks[key] != usual[key]:
            raise RequestError(
                f"lockstep verify {name} has no use for --{key} {asks[key]}: it starts the runs of all variants "
                "itself, and continues some; leave it out."
            )
    kind = KINDS.get(asked.strategy)
    if kind is not None and kind.has_two_levels:
        raise RequestError(
            f"--strategy {asked.strategy} needs several nodes, which are started by hand; lockstep verify gradients "
            "measures it."
        )
    if kind is not None and not (kind.has_ranks or kind.drives_all):
        raise RequestError(f"--strategy {asked.strategy} is what the others are compared with; leave it out.")
    alone = dataclasses.replace(config, parallel=ParallelConfig(accelerator=asked.accelerator))
    if not plan(alone).starts_here:
        raise RequestError(
            f"lockstep verify {name} starts all ranks itself, and this process is a rank by its environment; start the "
            "command once, without torchrun, or, if the variables are left over: unset RANK WORLD_SIZE LOCAL_RANK."
        )
    count = variants.several(config)
    several = override(config, devices=count)
    plan(several) if script else check(several)
    return Setup(
        config=config,
        folder=Path(),
        devices=count,
        is_cpu=variants.gpus(config) == 0,
        arguments=("run" if script else "train", *flags.without(given, _VARIED)),
        script=tuple(script),
        name=name,
    )


def judge(asked: Setup, tolerance: float) -> int:
    """Run and compare all variants; return 0 where they agree. Raises `ProofError` where they do not.

    Raises `RequestError` where none can be compared.
    """
    setup = dataclasses.replace(asked, folder=_folder(asked))
    begun_s, screen, found = time.monotonic(), Screen(stderr=True), list[Outcome]()
    for each in curve.outcomes(setup, tolerance=tolerance):
        found.append(each)
        note = f", {each.why_not}" if each.why_not else ""
        if each.parting:
            tensors = curve.TENSORS[setup.name]
            note += f", losses {curve.size(each.parting.loss)}, {tensors} {curve.size(each.parting.weight)}"
        screen.say(f"{each.variant.name}: {each.verdict}{note} ({each.seconds:.1f} s)")
    check = curve.check(setup.name, found, tolerance, setup.config.precision.name, time.monotonic() - begun_s)
    _keep(setup.folder, check, found)
    with output.written():
        _print(Screen(), found, setup, tolerance)
        if check.outcome == Check.HOLDS:
            Screen().say(f"The same {_SAME[setup.name]}: {check.found}.")
    if check.outcome == Check.OPEN:
        raise RequestError(
            f"Nothing could be compared: {next(each.why_not for each in found if each.why_not)}; give fewer --devices, "
            "or a larger batch."
        )
    if check.fails:
        raise ProofError(
            f"The variants have not the same {_SAME[setup.name]}: {check.found}; the runs are in {setup.folder}."
        )
    return 0


def _folder(setup: Setup) -> Path:
    """Return the folder for the runs; make a new one."""
    path = setup.config.record.output
    if path is not None and path.is_dir() and any(next(path.glob(pattern), None) for pattern in _HELD):
        raise RequestError(f"--output {path} holds a run already; give another folder.")
    try:
        path = path or folders.fresh(f"{folders.default_name(setup.config)}-{setup.name}")
        path.mkdir(parents=True, exist_ok=True)
        for each in path.iterdir():  # a variant's folder or log of that name would lead elsewhere
            check_own(each)
    except OSError as error:
        raise folders.unwritable(path, error) from error
    return path


def _keep(folder: Path, check: Check, found: Sequence[Outcome]) -> None:
    """Write the proof into the folder, with each variant's commands and numbers."""
    rows = [
        {
            "name": each.variant.name,
            "compared_with": each.variant.partner or None,
            "verdict": each.verdict,
            "note": each.why_not,
            "same_bits_required": each.variant.same_bits,
            **({} if each.parting is None else dataclasses.asdict(each.parting)),
            "seconds": each.seconds,
            "commands": [shlex.join(command) for command in each.variant.commands],
        }
        for each in found
    ]
    try:
        checks.add(folder, [check], variants=rows)
    except OSError as error:
        raise RunError(f"The proof cannot be written to {folder}: {error.strerror}; {check.found}.") from error


def _print(screen: Screen, found: Sequence[Outcome], setup: Setup, tolerance: float) -> None:
    rows, notes = [], dict[str, list[str]]()
    for each in found:
        parting, cells = each.parting, ["", "", ""]
        if parting is not None:
            cells = [curve.size(parting.loss), curve.size(parting.weight), parting.place]
        rows.append((each.variant.name, each.variant.partner, *cells, each.verdict))
        if each.why_not:
            notes.setdefault(each.why_not, []).append(each.variant.name)
    screen.table(("variant", "compared with", "losses", curve.TENSORS[setup.name], "begins", ""), rows, texts=2)
    for note, names in notes.items():
        screen.say((f"{', '.join(names)}: {note}", "dim"))
    how = f"precision {setup.config.precision.name}, tolerance {tolerance:g} of the largest value"
    screen.say((f"{how}; 0 where the same bits are due; commands and runs in {setup.folder}", "dim"))
    by_name = {each.variant.name: each.variant for each in found}
    for each in (each for each in found if each.verdict == curve.PARTS):
        screen.print()
        screen.say(each.sentence(curve.TENSORS[setup.name]))
        for command in (*by_name[each.variant.partner].commands, *each.variant.commands):
            screen.say(f"  {shlex.join(command)}")
