"""What `compare`, `forecast` and `verify` share: a job, its devices, its folder."""

from __future__ import annotations

import contextlib
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .. import hardware
from ..compare import grid
from ..compare.grid import Cell, Words
from ..compare.records import json_of
from ..config.options import recipes
from ..config.schema import RunConfig
from ..errors import RequestError, Stopped
from ..files import DEFECTS, shown, write_json
from ..launchers.devices import visible_gpus
from ..record import checks
from ..record.checks import Check
from ..runs import folders
from ..screen import Screen, line
from ..versions import version_of
from . import flags, run
from .preflight import check, check_names

_BUSY, _LOOK_S = 0.15, 0.5
"""Warn above this CPU share of other programs; measure it for so many seconds."""


class Job:
    """The job of all variants, as the words of a command."""

    def __init__(self, given: list[str], own: Mapping[str, type], *, prog: str) -> None:
        """Parse the words of the command `prog`, whose flags are `own`."""
        switches = [name for name, kind in own.items() if kind is bool]
        self.is_script = run.names_script(given, switches)
        ours, self._script = run.split(given, switches) if self.is_script else (given, [])
        self.asked, self.given = flags.take(ours, {**own, "--output": str}, prog=prog)
        """Values of the flags `own`, and the other words before a script."""
        lacking = {"--vary", "--network"} & (own.keys() - self.asked.keys())
        if behind := lacking & {word.partition("=")[0] for word in self._script[1:]}:
            raise RequestError(f"{min(behind)} comes after the script, whose own it is there; put it before that.")
        self.is_weak, self._prog = self.asked.get("--scaling") == "weak", prog
        named = {word.partition("=")[0] for word in self.given} & {"--config", "--model", "--data"}
        if not self.is_script and not named and all(word.startswith("-") for word in self.given[:1]):
            raise RequestError(f"{prog} lacks a job: give a recipe ({', '.join(recipes())}), or a script.")
        if (scaling := self.asked.get("--scaling", "strong")) not in ("strong", "weak"):
            raise RequestError(f"--scaling {scaling}: give strong (one global batch) or weak (one batch a device).")

    def config(self, more: Words = ()) -> RunConfig:
        """Return the job's config with more flags. Raises `RequestError`."""
        if self.is_script:
            return run.parse([*self.given, *more, *self._script], prog=self._prog)[0]
        config = flags.parse([*self.given, *more], prog=self._prog)
        check(config)
        return config

    def check_value(self, key: str, value: str) -> None:
        """Raise `RequestError` for a value that is invalid in any combination."""
        check_names(flags.parse([*grid.words(key, value)], prog=self._prog, base=RunConfig(), check=lambda *_: None))

    def command(self, cell: Cell, folder: Path) -> Words:
        """Return the command to measure. It writes to `folder`, and evaluates nothing."""
        never = () if self.is_script else ("--eval-every", str(10**9))
        return self._with(*cell.flags, "--output", str(folder), *never)

    def training(self, cell: Cell, folder: Path, seed: int) -> Words:
        """Return the command of one whole training of a cell."""
        return self._with(*cell.flags, "--output", str(folder), "--seed", str(seed), "--resume", "auto")

    def shown(self, flags: Sequence[str] = ()) -> list[str]:
        """Return the command as on a terminal, with more flags."""
        return ["lockstep", *self._with(*flags)]

    def _with(self, *more: str) -> Words:
        return ("run" if self.is_script else "train", *self.given, *more, *self._script)

    def folder(self, kind: str, plan: Mapping[str, Any]) -> Path:
        """Return the folder of this comparison or forecast (`kind`).

        It may hold a part already. Raises `RequestError` for one with another `plan`, measurements of another machine,
        or other files.
        """
        asked = self.asked.get("--output")
        path = Path(asked) if asked else folders.fresh(f"{folders.default_name(self.config())}-{kind}")
        machine = [platform.node(), *(f"{version_of(name)}" for name in ("lockstep-torch", "torch"))]
        plan = {"job": self.shown(), **plan, "machine": machine}
        with kept_in(path):
            before = json_of(path / "plan.json")
            if before and before != plan:
                raise RequestError(f"--output {path} holds another {kind}; give another folder.")
            if not before and asked and path.is_dir() and any(path.iterdir()):
                raise RequestError(f"--output {path} holds something else; give another folder.")
            path.mkdir(parents=True, exist_ok=True)
            if not before:
                write_json(path / "plan.json", plan)
        return path


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Turn stops and write failures of the block into errors with advice."""
    try:
        yield
    except (KeyboardInterrupt, Stopped):
        raise Stopped(
            f"Stopped on request; start the same command with --output {shown(folder)} to go on where it was."
        ) from None
    except OSError as error:
        raise folders.unwritable(folder, error) from error


def crowded(screen: Screen) -> str:
    """Warn of other programs' current CPU load. Returns the warning, "" for a low load."""
    share = psutil.cpu_percent(_LOOK_S) / 100
    if share < _BUSY:
        return ""
    told = (
        f"Other programs use {share:.0%} of the processors: intervals are wider, and a process whose threads wait for "
        "one another loses more time than several of one thread each. Measure again when they have ended."
    )
    screen.say((f"warning: {told}", "yellow"))
    return told


def whole_number(name: str, text: str | None) -> int | None:
    """Return the number. Raises `RequestError` unless it is whole and positive."""
    if text is not None and not (text.isdecimal() and int(text)):
        raise RequestError(f"{name} {text}: give a whole number of 1 or more.")
    return None if text is None else int(text)


def gpus(config: RunConfig) -> int:
    """Return the number of GPUs that the config may use here."""
    return 0 if config.parallel.accelerator == "cpu" else len(hardware.gpus(visible_gpus()))


def several(config: RunConfig) -> int:
    """Return the devices asked for. Default: all GPUs, else two processes.

    Raises `RequestError` where that leaves nothing to compare with one.
    """
    asked = config.parallel
    count = asked.devices or len(asked.gpu_indices) or gpus(config) or 2
    if count < 2:
        raise RequestError(
            f"{f'--devices {asked.devices}' if asked.devices else 'One GPU'} leaves nothing to compare: give --devices "
            "2 or more, with --accelerator cpu where there are not as many GPUs."
        )
    return count


def unwritten(folder: Path, found: Iterable[Check]) -> str:
    """Add the checks to the folder's files. Return why that failed, else ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checks.add(folder, found)
    except DEFECTS as error:  # not writable, or not what we have written
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return f"{checks.SHEET} and {checks.SUMMARY} in {folder} could not be written ({why}); the verdict stands."
    return ""


def machine() -> str:
    """Return this machine's processors and GPUs as text."""
    facts = hardware.survey(visible_gpus())
    gpus = Counter(gpu.name for gpu in facts.gpus)
    return ", ".join([f"{facts.cpus} × {facts.cpu_name}", *(f"{count} × {name}" for name, count in gpus.items())])


def provenance() -> str:
    """Return a report's date and the command that made it."""
    return f"Made {time.strftime('%Y-%m-%d %H:%M')} by: {shlex.join(['lockstep', *sys.argv[1:]])}"


@contextlib.contextmanager
def notifier(screen: Screen) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress; one line on a terminal."""
    if screen.is_terminal:
        with screen.status("") as status:
            yield lambda phrase: status.update(line(phrase))
    else:
        yield screen.say
