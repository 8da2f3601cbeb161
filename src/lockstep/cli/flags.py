"""Convert a command line to dataclasses, by tyro: a `RunConfig` from recipe, file and flags, or a verb's own flags."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ..config.options import NAMES_OF_CODE, flatten, leaves, read_toml, recipe
from ..config.schema import RunConfig
from ..config.validity import Bounds
from ..data import sets
from ..errors import RequestError, unknown
from ..files import shown
from ..runs import folders
from . import output

T = TypeVar("T")
_READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "milestones": ("schedule", ("step", "multistep")),
    "gamma": ("schedule", ("step", "multistep")),
    "momentum": ("optimizer", ("sgd", "muon")),
    "nesterov": ("optimizer", ("sgd", "muon")),
    "base-batch": ("lr-rule", ("linear", "sqrt")),
}
"""{flag: the one on which its effect depends, and the values with which it has one}"""
_FLAG = re.compile("--?[A-Za-z]")
"""How a flag begins, and no value does, such as a negative number."""


@dataclass(frozen=True)
class Arguments:
    """Train one model on any number of devices. With --dry-run: print the plan, and start nothing."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    recipe: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[RECIPE]")] = None
    """A recipe's name (lockstep info lists them); flags and --config override its values."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """A TOML file whose keys are flag names; flags override it, and it overrides the recipe."""


_GONE = {
    "clear-meeting": "a stale file:// rendezvous is harmless; leave it out",
    "find-unused": "parameters without a gradient are found in any case; leave it out",
    "launcher ray": "call lockstep.session() in the train function of Ray Train's TorchTrainer (docs/ray.md)",
}
"""Flags of earlier versions, some with their value, and what to do instead."""


def check_read(given: Iterable[str], config: RunConfig) -> None:
    """Raise `RequestError` for the first flag without effect in `config`. `given` are flags without dashes.

    A flag on the command line must matter; a recipe or a file may set an option that a flag has made idle.
    """
    values, readers = flatten(config), _READERS | {flag: ("data", names) for flag, names in sets.readers().items()}
    for flag in (flag for flag in given if flag in readers and values[flag] is not False):
        chooser, fitting = readers[flag]
        chosen = values[chooser]
        if chosen not in (*fitting, "auto") and ":" not in chosen:  # code of the user's own may read any
            belongs = f"it belongs to {' and '.join(fitting)}; leave it out, or choose another --{chooser}"
            raise RequestError(f"--{flag} has no effect with --{chooser} {chosen}: {belongs}.")


def parse(
    given: list[str],
    *,
    prog: str,
    base: RunConfig | None = None,
    source: Path | None = None,
    imports: bool = True,
    check: Callable[[Collection[str], RunConfig], None] = check_read,
) -> RunConfig:
    """Return the config of the arguments, over `base`. Without a base, a recipe may come first.

    `source` is the file of `base`, and `imports` whether the config's code will be imported. `check` refuses flags, by
    their names without dashes, that would have no effect in the config.

    Raises `RequestError` for an unknown recipe, flag or value, with the nearest names; exits 0 after --help.
    """
    named = given[:1] if base is None and given and not _FLAG.match(given[0]) else []
    base = recipe(named[0]) if named else base or RunConfig()
    if {"--help", "-h"} & {*given}:
        with output.written():
            told, options = Arguments(run=base), (tyro.conf.OmitArgPrefixes,)
            tyro.cli(Arguments, args=["--help"], prog=prog, default=told, config=options)  # which exits
    names = _names(given, prog)
    own, rest = take(given[len(named) :], {"--config": str}, prog=prog)
    if "--config" in own:
        source = Path(own["--config"])
        base = read_toml(source, base=base, through_links=True)
    if imports:
        _check_code(base, names, source)
    config = _parsed(lambda: tyro.cli(RunConfig, args=rest, default=base, config=(tyro.conf.OmitArgPrefixes,)), prog)
    check(names, config)
    if "--config" in own and source is not None:
        folders.check_meant(config, source)
    return config


def take(given: list[str], own: Mapping[str, type], *, prog: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a verb's `own` flags, and the other words. Types are bool, float, str; list for several.

    Raises `RequestError` for a flag without its value, and for a number that is negative or infinite.
    """
    kinds: dict[Any, Any] = {bool: bool, list: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]}
    unset: dict[Any, Any] = {bool: False, list: ()}
    fields = [
        (name[2:].replace("-", "_"), kinds.get(kind, kind | None), field(default=unset.get(kind)))
        for name, kind in own.items()
    ]
    for word in given:
        if "=" in word and own.get(word.partition("=")[0].replace("_", "-")) is bool:
            raise RequestError(f"{word}: this flag takes no value.")  # tyro would take any for true
    found: Any
    found, rest = _parsed(
        lambda: tyro.cli(make_dataclass("Own", fields), args=given, add_help=False, return_unknown_args=True), prog
    )
    values = {name: getattr(found, name[2:].replace("-", "_")) for name in own}
    for name, value in values.items():
        if isinstance(value, float):
            Bounds(least=0).check(name[2:], value)
    return {name: value for name, value in values.items() if value not in (None, False, ())}, rest


def without(given: list[str], names: Collection[str]) -> list[str]:
    """Return the words `given` without these flags and their values. `names` have no dashes."""
    kept, is_dropped = list[str](), False
    for word in given:
        if _FLAG.match(word):
            is_dropped = _name(word) in names
        if not is_dropped:
            kept.append(word)
    return kept


def _name(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("_", "-")


def _names(given: list[str], prog: str) -> list[str]:
    """Return the names of the flags given, without dashes and no-. Raises `RequestError` for an unknown one, and for
    what tyro would take: a value of a flag that has none, and an empty path.
    """
    known = {leaf.key: leaf.kind for leaf in leaves()} | {"config": Path}
    names = []
    for word, following in zip(given, [*given[1:], None], strict=False):
        if not _FLAG.match(word):
            continue
        key = _name(word) if _name(word) in known else _name(word).removeprefix("no-")
        for text in (key, f"{key} {following}", f"{key} {word.partition('=')[2]}"):
            if text in _GONE:
                raise RequestError(f"--{text} is gone: {_GONE[text]}.")
        if key not in known:
            raise unknown("flag", word.partition("=")[0], [f"--{each}" for each in known], f"{prog} --help lists all.")
        if known[key] is bool and "=" in word:
            raise RequestError(f"{word}: this flag takes no value; write --{key} or --no-{key}.")
        if known[key] is Path and (word.endswith("=") or following == ""):
            raise RequestError(f"--{key} lacks its value; give a path.")
        names.append(key)
    return names


def _parsed(call: Callable[[], T], prog: str) -> T:
    """Return what tyro makes of a command line. Raises `RequestError` with what it prints of an error."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return call()
    except SystemExit as error:
        _, *lines = [line.strip(" │|") for line in told.getvalue().splitlines()]  # in a box, under a title
        shown = takewhile(lambda line: not line.startswith(("Argument help", "For full help", "Got errors")), lines)
        sentence = " ".join(line for line in shown if re.search(r"\w", line)).removesuffix(".")
        raise RequestError(f"{sentence}; {prog} --help lists all.") from error


def _check_code(base: RunConfig, names: Collection[str], source: Path | None) -> None:
    """Raise `RequestError` for untrusted code: a file names it, no flag does. `names` are the flags given."""
    found = {key: value for key, value in flatten(base, NAMES_OF_CODE).items() if ":" in value and key not in names}
    if repeated := " ".join(f"--{key} {shlex.quote(value)}" for key, value in found.items()):
        raise RequestError(
            f"{shown(source)} names code of its own, which is imported only where the command line names it; if you "
            f"trust it, add {repeated}."
        )
