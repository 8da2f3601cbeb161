"""From the command line to a `RunConfig`: recipe, then file, then flags. tyro reads the dataclasses; there is no
other list of flags. What tyro says in a box is said here in a sentence.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..config import RunConfig, leaves, read_toml, recipe
from ..errors import RequestError, unknown

_FRAME = " ╭╮╰╯│+|"
_RULE = re.compile("[─-]+")
_OWN = ("config", "help")


@dataclass(frozen=True)
class Arguments:
    """Train one model on any number of devices."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    recipe: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="RECIPE")] = None
    """A recipe's name (lockstep info lists them); flags and --config beat its values."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """A TOML file with options by their flags' names; flags beat it, it beats the recipe."""


def parse(given: list[str], *, prog: str, base: RunConfig | None = None) -> RunConfig:
    """Return the config that the arguments ask for, over `base`.

    Raises `RequestError`, with the nearest names, for whatever is not a recipe or a flag; exits 0 after --help.
    """
    named = base is None and bool(given) and not given[0].startswith("-")
    base = recipe(given[0]) if named else base or RunConfig()
    if (path := _value(given, "--config")) is not None:
        base = read_toml(Path(path), base=base)
    _check_flags(given)
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            arguments = tyro.cli(
                Arguments,
                args=given,
                prog=prog,
                default=Arguments(run=base),
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as refused:
        if refused.code in (0, None):
            raise
        raise RequestError(_sentence(heard.getvalue())) from None
    if arguments.recipe is not None and not named:
        raise RequestError(
            f"{arguments.recipe!r} belongs to no flag; a recipe comes first, as in lockstep train digits --batch 64."
        )
    return arguments.run


def _value(given: list[str], flag: str) -> str | None:
    for number, word in enumerate(given):
        if word == flag and number + 1 < len(given):
            return given[number + 1]
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


def _check_flags(given: list[str]) -> None:
    """Raise for a flag that does not exist; negative numbers are no flags."""
    known = {leaf.key for leaf in leaves()} | set(_OWN)
    switches = {leaf.key for leaf in leaves() if leaf.type is bool}
    known |= {f"no-{key}" for key in switches}
    for word in given:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("_", "-")
            if name not in known:
                raise unknown("flag", f"--{name}", {f"--{key}" for key in known}, "lockstep train --help lists all.")


def _sentence(box: str) -> str:
    """Return tyro's message, without the box around it and the help text below it, as one line."""
    _title, *lines = [line.strip(_FRAME) for line in box.strip().splitlines()]
    below = itertools.dropwhile(_RULE.fullmatch, lines)  # a terminal without line drawing has a rule there
    message = itertools.takewhile(lambda line: not _RULE.fullmatch(line), below)
    return " ".join(message).rstrip(".") + "; lockstep train --help lists the flags and their values."
