"""What `compare` and `forecast` share: one job with flags that vary, and the folder that keeps what was measured."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .. import folders
from ..compare.grid import Cell, Words
from ..config import RunConfig
from ..errors import RequestError
from ..files import parse_json, read, understanding, write_json
from ..options import recipes
from ..screen import Screen, line
from ..versions import version_of
from . import flags, run
from .train import check, preflight

_BUSY, _LOOK_S = 0.15, 0.5
"""The share of the processors from which on it is told that other programs use them, and how long that is looked at."""


class Job:
    """What all variants have: the command's own words."""

    def __init__(self, given: Sequence[str], script: Sequence[str], *, prog: str, lacks: str = "") -> None:
        """`lacks` is a flag of the command's own that was not given: it may stand behind the script."""
        if lacks and any(word.partition("=")[0] == lacks for word in script[1:]):
            raise RequestError(f"{lacks} comes after the script, whose own it is there; put flags of {prog} before it.")
        named = {word.partition("=")[0] for word in given} & {"--config", "--model", "--data"}
        if not script and not named and all(word.startswith("-") for word in given[:1]):
            raise RequestError(f"{prog} lacks a job: give a recipe ({', '.join(recipes())}), or a script.")
        self._prog = prog
        self._given = flags.without([*given], ("output",))
        self._script = tuple(script)
        output = flags.parse([*given], prog=prog, check=_anything) if not script else None
        self.output = output.record.output if output else run.asked([*given, *script], prog=prog)[0].record.output

    def check_value(self, words: Words) -> None:
        """Raise `RequestError` for a flag whose value can never be one, whatever else is asked for."""
        preflight(flags.parse([*words], prog=self._prog, base=RunConfig(), check=_anything))

    def config(self, more: Words) -> RunConfig:
        """Return the config of the job with more flags. Raises `RequestError` where it cannot be."""
        if self._script:
            config, _ = run.asked([*self._given, *more, *self._script], prog=self._prog)
        else:
            config = flags.parse([*self._given, *more], prog=self._prog)
            check(config)
        return dataclasses.replace(config, record=dataclasses.replace(config.record, output=self.output))

    def command(self, cell: Cell, folder: Path) -> Words:
        """Return the words of the cell's command that is measured: it writes to this folder, and evaluates nothing."""
        return self._words(cell, folder, *(() if self._script else ("--eval-every", str(10**9))))

    def training(self, cell: Cell, folder: Path, seed: int) -> Words:
        """Return the words of a whole training of the cell's."""
        return self._words(cell, folder, "--seed", str(seed), "--resume", "auto")

    def _words(self, cell: Cell, folder: Path, *more: str) -> Words:
        return self._with(*cell.flags, "--output", str(folder), *more)

    def _with(self, *more: str) -> Words:
        return ("run" if self._script else "train", *self._given, *more, *self._script)

    def shown(self, flags: Sequence[str] = ()) -> list[str]:
        """Return the command as a person would give it, with what varies."""
        return ["lockstep", *self._with(*flags)]


def _anything(names: Any, config: RunConfig) -> None:
    """Nothing is refused yet: what varies is not there."""


def scaling(text: str) -> bool:
    """Return whether scaling is weak. Raises `RequestError` for another word than strong or weak."""
    if text not in ("strong", "weak"):
        raise RequestError(f"--scaling {text}: give strong (one global batch) or weak (one batch a device).")
    return text == "weak"


def folder_of(base: RunConfig, kind: str, plan: Mapping[str, Any]) -> Path:
    """Return the folder of a comparison or forecast (`kind`), which may hold a part of it already.

    Raises `RequestError` where it holds another `plan`, or something else.
    """
    asked = base.record.output
    path = folders.fresh(f"{folders.default_name(base)}-{kind}") if asked is None else asked
    file = path / "plan.json"
    try:
        if file.exists():
            with understanding(file):
                before = parse_json(read(file))
            if before != plan:
                raise RequestError(f"--output {path} holds another {kind}; give another folder.")
        elif asked is not None and path.is_dir() and any(path.iterdir()):
            raise RequestError(f"--output {path} holds something else; give another folder.")
        path.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_json(file, plan)
    except OSError as error:
        raise folders.unwritable(path, error) from error
    return path


def machine() -> list[str]:
    """Return what makes numbers of one folder comparable beside the job: the host, and what has run it."""
    return [platform.node(), *(f"{version_of(name)}" for name in ("lockstep-torch", "torch"))]


def crowded(screen: Screen) -> str:
    """Say how much of the processors other programs use now, and what that does; return it, "" where it is little."""
    share = psutil.cpu_percent(_LOOK_S) / 100
    if share < _BUSY:
        return ""
    told = (
        f"Other programs use {share:.0%} of the processors: intervals are wider, and a process whose threads wait for "
        "one another loses more time than several of one thread each. Measure again when they have ended."
    )
    screen.say((f"warning: {told}", "yellow"))
    return told


@contextlib.contextmanager
def telling(screen: Screen) -> Iterator[Any]:
    """Yield what says what is being done: in one line that changes, or line by line where nobody watches."""
    if screen.is_terminal:
        with screen.status("") as status:
            yield lambda phrase: status.update(line(phrase))
        return
    yield screen.say
