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
from ..launchers.devices import find, visible_gpus
from ..record import checks
from ..record.checks import Check
from ..runs import folders
from ..screen import Screen, line
from ..versions import version_of
from . import flags, run
from .preflight import check, check_names

_BUSY, _LOOK_S = 0.15, 0.5  # CPU share of other programs above which to warn; seconds to measure it


class Job:
    """The job of all variants, as the words of a command."""

    def __init__(self, words: list[str], types: Mapping[str, type], *, prog: str) -> None:
        """Parse the words of the command `prog`, which has flags of these `types`."""
        switches = [name for name, kind in types.items() if kind is bool]
        self.is_script = run.names_script(words, switches)
        flag_words, self._script = run.split(words, switches) if self.is_script else (words, [])
        self.options, self.words = flags.take(flag_words, {**types, "--output": str}, prog=prog)
        """Values of the command's flags, and the other words before a script."""
        lacking = {"--vary", "--network"} & (types.keys() - self.options.keys())
        if behind := lacking & {word.partition("=")[0] for word in self._script[1:]}:
            raise RequestError(f"{min(behind)} comes after the script and so belongs to it; put it before the script.")
        self.is_weak, self._prog = self.options.get("--scaling") == "weak", prog
        sources = {word.partition("=")[0] for word in self.words} & {"--config", "--model", "--data"}
        if not self.is_script and not sources and all(word.startswith("-") for word in self.words[:1]):
            raise RequestError(f"No job given: give a recipe ({', '.join(recipes())}), or a script.")
        if (scaling := self.options.get("--scaling", "strong")) not in ("strong", "weak"):
            raise RequestError(f"--scaling {scaling}: give strong (one global batch) or weak (one batch a device).")

    def config(self, extra: Words = ()) -> RunConfig:
        """Return the job's config with more flags. Raises `RequestError`."""
        if self.is_script:
            return run.parse([*self.words, *extra, *self._script], prog=self._prog)[0]
        config = flags.parse([*self.words, *extra], prog=self._prog)
        check(config)
        return config

    def check_value(self, key: str, value: str) -> None:
        """Raise `RequestError` for a value that is invalid in any combination."""
        check_names(flags.parse([*grid.words(key, value)], prog=self._prog, base=RunConfig(), check=lambda *_: None))

    def command(self, cell: Cell, folder: Path) -> Words:
        """Return the command to measure, which writes to `folder` and evaluates nothing."""
        never = () if self.is_script else ("--eval-every", str(10**9))
        return self._with(*cell.flags, "--output", str(folder), *never)

    def training(self, cell: Cell, folder: Path, seed: int) -> Words:
        """Return the command of one whole training of a cell."""
        return self._with(*cell.flags, "--output", str(folder), "--seed", str(seed), "--resume", "auto")

    def shown(self, flags: Sequence[str] = ()) -> list[str]:
        """Return the command as on a terminal, with more flags."""
        return ["lockstep", *self._with(*flags)]

    def _with(self, *extra: str) -> Words:
        return ("run" if self.is_script else "train", *self.words, *extra, *self._script)

    def folder(self, kind: str, plan: Mapping[str, Any]) -> Path:
        """Return the folder of this comparison or forecast (`kind`), which may be partly done.

        Raises `RequestError` for a folder with another `plan`, another machine's measurements, or other files.
        """
        requested = self.options.get("--output")
        path = Path(requested) if requested else folders.fresh(f"{folders.default_name(self.config())}-{kind}")
        machine = [platform.node(), *(f"{version_of(name)}" for name in ("lockstep-torch", "torch"))]
        plan = {"job": self.shown(), **plan, "machine": machine}
        with advice_on_failure(path):
            earlier = json_of(path / "plan.json")
            if earlier and earlier != plan:
                raise RequestError(f"--output {path} holds another {kind}; give another folder.")
            if not earlier and requested and path.is_dir() and any(path.iterdir()):
                raise RequestError(f"--output {path} holds something else; give another folder.")
            path.mkdir(parents=True, exist_ok=True)
            if not earlier:
                write_json(path / "plan.json", plan)
        return path


@contextlib.contextmanager
def advice_on_failure(folder: Path) -> Iterator[None]:
    """Turn stops and write failures of the block into errors with advice."""
    try:
        yield
    except (KeyboardInterrupt, Stopped):
        raise Stopped(
            f"Stopped on request; start the same command with --output {shown(folder)} to continue it."
        ) from None
    except OSError as error:
        raise folders.unwritable(folder, error) from error


def warn_of_load(screen: Screen) -> str:
    """Warn if other programs load the CPU. Returns the warning, "" for a low load."""
    share = psutil.cpu_percent(_LOOK_S) / 100
    if share < _BUSY:
        return ""
    warning = (
        f"Other programs use {share:.0%} of the processors: intervals are wider, and a process whose threads wait for "
        "one another loses more time than several of one thread each. Measure again when they have ended."
    )
    screen.say((f"warning: {warning}", "yellow"))
    return warning


def whole_number(name: str, text: str | None) -> int | None:
    """Return the number. Raises `RequestError` unless it is whole and positive."""
    if text is not None and not (text.isdecimal() and int(text)):
        raise RequestError(f"{name} {text}: give a whole number of 1 or more.")
    return None if text is None else int(text)


def gpus(config: RunConfig) -> int:
    """Return the number of GPUs that the config may use here."""
    return find(config.parallel.accelerator)[1]


def device_count(config: RunConfig) -> int:
    """Return the requested number of devices; by default all GPUs, else two processes.

    Raises `RequestError` for a single device, which leaves nothing to compare.
    """
    parallel = config.parallel
    count = parallel.devices or len(parallel.gpu_indices) or gpus(config) or 2
    if count < 2:
        source = f"--devices {parallel.devices}" if parallel.devices else "One GPU"
        raise RequestError(
            f"{source} leaves nothing to compare: give --devices 2 or more, with --accelerator cpu where there are not "
            "as many GPUs."
        )
    return count


def add_checks(folder: Path, new: Iterable[Check]) -> str:
    """Add checks to the folder's files. Returns the reason if that fails, else ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checks.add(folder, new)
    except DEFECTS as error:  # not writable, or damaged
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return f"{checks.SHEET} and {checks.SUMMARY} in {folder} could not be written ({reason}); the verdict stands."
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
    """Yield a function that shows progress, on a terminal in one line."""
    if screen.is_terminal:
        with screen.status("") as status:
            yield lambda phrase: status.update(line(phrase))
    else:
        yield screen.say
