"""`lockstep verify curve [RECIPE] [flags]`: short runs of the variants of one config, and where they part."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ... import folders, hardware, proof
from ...config import ParallelConfig, RunConfig
from ...errors import ProofError, RequestError, RunError, counted
from ...kinds import KINDS, with_several
from ...launchers import table as launchers
from ...options import flatten, override
from ...proof import Check
from ...prove import curve, variants
from ...prove.curve import Outcome
from ...prove.variants import Setup
from .. import flags, output
from ..train import preflight

_USAGE = """\
usage: lockstep verify curve [RECIPE] [--tolerance T] [flags of lockstep train]

Trains the same few steps on one device and in all other ways: under each strategy on --devices devices (default: all
GPUs, or 2 CPU processes) and on one more, with accumulation, with ranks started by torchrun and by hand, and stopped in
the middle and continued. Prints how far their losses and weights are from one another, and where that begins.

Each run is a command of its own; commands, logs and runs lie in the output folder, with proof.md and summary.json.

  --tolerance T    the relative difference that counts as none (default: 1e-9 in fp64, 1e-3 in other precisions)
  --precision P    default: fp64
  --max-steps N    default: 20; learning rates follow --epochs
  --strategy S     compare this strategy alone with one device
  --output FOLDER  default: runs/DATA-MODEL-curve

lockstep train --help lists the other flags. Exit code: 0 all agree, 3 some do not, 2 it cannot be tried.
"""
_STEPS = 20
_DEVICES = 2
_OF_RANKS = ("resume", "rank", "world-size", "init-method", "launcher", "nodes")
"""Options that say how one run starts, which here is what is varied."""
_HELD = ("manifest.json", "*/manifest.json", "summary.json", "checkpoints")
"""What shows that a folder holds a run, or the runs of another proof."""
_WIDE = 200
"""Columns where the output is no terminal."""


def main(given: list[str]) -> int:
    """Train and compare; return 0 where all variants agree, raise `ProofError` where they do not."""
    if given and given[0] in ("-h", "--help"):
        with output.written():
            print(_USAGE, end="")
        return 0
    words, tolerance = _tolerance(given)
    if not any(word.partition("=")[0] == "--precision" for word in words):
        words = [*words, "--precision", "fp64"]
    config = flags.parse(words, prog="lockstep verify curve")
    config = override(config, max_steps=config.max_steps or _STEPS)
    tolerance = curve.default_tolerance(config) if tolerance is None else tolerance
    with _folder(_checked(config)) as setup:
        begun_s = time.monotonic()
        with _telling() as (tell, told):
            found = [told(each) for each in curve.outcomes(setup, tolerance=tolerance, tell=tell)]
        check = _check(found, tolerance, setup.config.precision.name, time.monotonic() - begun_s)
        _keep(setup.folder, check, found)
    with output.written():
        _print(found, setup, tolerance)
        if not check.fails:
            print(f"The same model: {check.found}.")
    if check.fails:
        raise ProofError(f"The variants are not the same model: {check.found}; the runs are in {setup.folder}.")
    return 0


def _tolerance(given: Sequence[str]) -> tuple[list[str], float | None]:
    """Return the words without --tolerance, and its value if there is one."""
    words: list[str] = []
    tolerance = None
    rest = iter(given)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag != "--tolerance":
            words.append(word)
            continue
        value = value if equals else next(rest, "")
        try:
            tolerance = float(value)
        except ValueError:
            tolerance = math.nan
        if not (tolerance >= 0 and math.isfinite(tolerance)):
            raise RequestError(f"--tolerance {value or repr(value)}: give 0 or more, such as 1e-9.")
    return words, tolerance


def _checked(config: RunConfig) -> Setup:
    """Return what the variants share, with no folder yet; raise `RequestError` for what cannot be tried.

    Nothing is started for it.
    """
    given, usual = flatten(config), flatten(RunConfig())
    for key in _OF_RANKS:
        if given[key] != usual[key]:
            raise RequestError(
                f"lockstep verify curve has no use for --{key} {given[key]}: it starts the runs of all variants "
                "itself, and continues some; leave it out."
            )
    preflight(config)
    asked = config.parallel
    if asked.strategy != "auto" and not (KINDS[asked.strategy].has_ranks or KINDS[asked.strategy].drives_all):
        raise RequestError(
            f"--strategy {asked.strategy} is what the others are compared with; name {with_several()}, or leave it out."
        )
    alone = dataclasses.replace(config, parallel=ParallelConfig(accelerator=asked.accelerator))
    if not launchers.starts_here(alone):
        raise RequestError(
            "lockstep verify curve starts all ranks itself, and this process is a rank by its environment; start the "
            "command once, without torchrun, or, if the variables are left over: unset RANK WORLD_SIZE LOCAL_RANK."
        )
    gpus = 0 if asked.accelerator == "cpu" else len(hardware.gpus(launchers.visible_gpus()))
    devices = asked.devices or len(asked.gpu_indices) or gpus or _DEVICES
    launchers.least_ranks(dataclasses.replace(config, parallel=dataclasses.replace(asked, devices=devices)))
    if devices < 2:
        where = f"--devices {asked.devices}" if asked.devices else "one GPU"
        raise RequestError(
            f"{where[0].upper()}{where[1:]} leaves nothing to compare: give --devices 2 or more, with --accelerator "
            "cpu where there are not as many GPUs."
        )
    setup = Setup(config=config, folder=Path(), devices=devices, is_cpu=gpus == 0)
    variants.check(setup)
    return setup


@contextlib.contextmanager
def _folder(setup: Setup) -> Iterator[Setup]:
    """Give the runs a folder, with the config that they share; it goes again where the first of them is refused."""
    path = _fresh(setup.config) if setup.config.record.output is None else _asked(setup.config.record.output)
    try:
        variants.write_config(setup := dataclasses.replace(setup, folder=path))
    except OSError as error:
        raise folders.unwritable(path, error) from error
    try:
        yield setup
    except RequestError:
        if not any(path.glob("*/manifest.json")):
            with contextlib.suppress(OSError):  # what else somebody has put there stays
                for file in (path / variants.CONFIG, *path.glob("*.log")):
                    file.unlink()
                path.rmdir()
        raise


def _asked(path: Path) -> Path:
    if path.is_dir() and any(next(path.glob(pattern), None) for pattern in _HELD):
        raise RequestError(f"--output {path} holds a run already; give another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--output {path} cannot be made: {error.strerror}; give another folder.") from error
    return path


def _fresh(config: RunConfig) -> Path:
    """Return a new default folder, numbered where there is one already."""
    name = f"{config.data.name}-{config.model.name}-curve".replace(":", ".").replace("/", ".")
    for number in count(1):
        path = folders.RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RequestError(f"{path} cannot be made: {error.strerror}; give --output FOLDER.") from error
        return path
    raise AssertionError("numbers do not end")


@contextlib.contextmanager
def _telling() -> Iterator[tuple[Callable[[str], None], Callable[[Outcome], Outcome]]]:
    """Tell on stderr how it goes: on a terminal the variant that is trained now, elsewhere a line for each."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda phrase: status.update(escape(phrase)), lambda each: each
        return

    def told(each: Outcome) -> Outcome:
        said = f", {each.note}" if each.note else ""
        if each.parting:
            said += f", losses {_size(each.parting.loss)}, weights {_size(each.parting.weight)}"
        console.print(f"{each.variant.name}: {each.verdict}{said} ({each.seconds:.1f} s)", markup=False)
        return each

    yield lambda phrase: None, told


def _check(found: Sequence[Outcome], tolerance: float, precision: str, cost_s: float) -> Check:
    claims = [each for each in found if each.is_claim]
    parted = [each for each in claims if each.verdict == curve.PARTS]
    return Check(
        name="curve",
        claim="Under every strategy, number of devices, launcher and continuation, training comes to one model",
        outcome=Check.FAILS if parted else Check.HOLDS,
        times=len(claims),
        tolerance=f"{tolerance:g} relative; {proof.BIT_FOR_BIT} in the same world",
        found=(_parted(parted, len(claims), precision) if parted else _held(claims, tolerance)) + _besides(found),
        cost_s=cost_s,
    )


def _held(claims: Sequence[Outcome], tolerance: float) -> str:
    partings = [each.parting for each in claims if each.parting]
    exact = sum(each.variant.same_bits for each in claims)
    loss, weight = (max(getattr(each, name) for each in partings) for name in ("loss", "weight"))
    steps = counted(partings[0].last_step, "step")
    return (
        f"{counted(len(claims), 'comparison')} over {steps}, {exact} bit for bit and {len(claims) - exact} within "
        f"{tolerance:g}; the largest difference is {_size(loss)} of a loss and {_size(weight)} of a tensor"
    )


def _besides(found: Sequence[Outcome]) -> str:
    said = [each.variant.name for each in found if each.verdict == curve.ANOTHER]
    return f"; {', '.join(said)}: another model by design, with batch statistics of each replica" if said else ""


def _parted(parted: Sequence[Outcome], claims: int, precision: str) -> str:
    first, *others = parted
    more = f"; so do {', '.join(each.variant.name for each in others)}, of {claims} compared" if others else ""
    # A net with BatchNorm makes rounding of fp32 grow to a thousandth of a loss within 20 steps of the digits recipe.
    hint = (
        "lockstep verify gradients looks for the cause"
        if precision == "fp64" or any(each.variant.same_bits for each in parted)
        else f"rounding in {precision} can grow to that, and --precision fp64 shows whether it is no more"
    )
    return f"{_sentence(first)}{more}; {hint}"


def _sentence(each: Outcome) -> str:
    parting = each.parting
    assert parting is not None
    begins = f"after step {parting.last_step}" if parting.step is None else f"at step {parting.step}"
    weights = f"weights by {_size(parting.weight)}, most in {parting.tensor}" if parting.tensor else "not in weights"
    return f"{each.variant.name} parts from {each.variant.partner} {begins}, losses by {_size(parting.loss)}, {weights}"


def _keep(folder: Path, check: Check, found: Sequence[Outcome]) -> None:
    """Write the proof into the folder, with each variant's commands and numbers."""
    rows = [
        {
            "name": each.variant.name,
            "compared_with": each.variant.partner or None,
            "verdict": each.verdict,
            "note": each.note,
            "same_bits_required": each.variant.same_bits,
            **({} if each.parting is None else dataclasses.asdict(each.parting)),
            "seconds": each.seconds,
            "commands": [shlex.join(command) for command in each.commands],
        }
        for each in found
    ]
    try:
        proof.add(folder, [check], variants=rows)
    except OSError as error:
        raise RunError(f"The proof cannot be written to {folder}: {error.strerror}; {check.found}.") from error


def _print(found: Sequence[Outcome], setup: Setup, tolerance: float) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    console.print(_table(found))
    config = setup.config
    notes = [f"{', '.join(names)}: {note}" for note, names in _notes(found).items()]
    notes.append(
        f"precision {config.precision.name}, tolerance {tolerance:g} of the largest value; 0 where the same bits are "
        f"due; commands and runs in {setup.folder}"
    )
    for note in notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)
    by_name = {each.variant.name: each for each in found}
    for each in found:
        if each.verdict == curve.PARTS:
            console.print(f"\n{_sentence(each)}", soft_wrap=True, markup=False)
            for side in (by_name[each.variant.partner], each):
                for command in side.commands:
                    console.print(f"  {shlex.join(command)}", soft_wrap=True, markup=False)


def _notes(found: Sequence[Outcome]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for each in found:
        if each.note:
            names.setdefault(each.note, []).append(each.variant.name)
    return names


def _table(found: Sequence[Outcome]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("variant", "compared with"):
        table.add_column(title, overflow="fold")
    for title in ("losses", "weights", "begins"):
        table.add_column(title, justify="right")
    table.add_column("")
    partners = Counter(each.variant.partner for each in found)
    for each in found:
        parting = each.parting
        cells = ["", "", ""] if parting is None else [_size(parting.loss), _size(parting.weight), parting.where]
        verdict = f"[bold]{each.verdict}[/]" if each.verdict == curve.PARTS else each.verdict
        dim = "dim" if not each.is_claim and not partners[each.variant.name] else ""
        table.add_row(escape(each.variant.name), escape(each.variant.partner), *cells, verdict, style=dim)
    return table


def _size(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"
