"""Convert a command line to a `RunConfig`: recipe, then file, then flags.

Flags are the options of `config.options` by their keys: their values are converted and checked as those of a TOML file
are; tyro draws the help from the same dataclasses.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import tyro

from ..config.options import NAMES_OF_CODE, apply, flatten, leaves, read_toml, recipe
from ..config.schema import RunConfig
from ..config.validity import Leaf
from ..data import sets
from ..errors import RequestError, unknown
from ..files import shown
from ..runs import folders
from . import output

_READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "milestones": ("schedule", ("step", "multistep")),
    "gamma": ("schedule", ("step", "multistep")),
    "momentum": ("optimizer", ("sgd", "muon")),
    "nesterov": ("optimizer", ("sgd", "muon")),
    "base-batch": ("lr-rule", ("linear", "sqrt")),
}
"""{flag: the one on which its effect depends, and the values with which it has one}"""
_CONFIG = Leaf("config", None, "", Path, False, None)
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


class _Flag(NamedTuple):
    """A flag as written, such as --data_dir, and its following words."""

    text: str
    words: list[str]

    @property
    def name(self) -> str:
        return self.text.removeprefix("--").replace("_", "-")


_GONE = {
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
    leading, flags = _read(given)
    named = leading[:1] if base is None else []
    _check_stray(leading[len(named) :])
    base = recipe(named[0]) if named else base or RunConfig()
    if any(flag.text in ("--help", "-h") for flag in flags):
        with output.written():
            arguments, options = Arguments(run=base), (tyro.conf.OmitArgPrefixes,)
            tyro.cli(Arguments, args=["--help"], prog=prog, default=arguments, config=options)  # which exits
    values = _values(flags)
    names = [*values]
    if "config" in values:
        source = Path(values.pop("config"))
        base = read_toml(source, base=base, through_links=True)
    if imports:
        _check_code(base, names, source)
    config = apply(base, values, source="the command line")
    check(names, config)
    if "config" in names and source is not None:
        folders.check_meant(config, source)
    return config


def without(given: list[str], names: Collection[str]) -> list[str]:
    """Return the words `given` without these flags and their values. `names` have no dashes."""
    leading, flags = _read(given)
    return [*leading, *(word for flag in flags if flag.name not in names for word in (flag.text, *flag.words))]


def _read(given: list[str]) -> tuple[list[str], list[_Flag]]:
    """Return the words before the first flag, and the flags."""
    leading: list[str] = []
    flags: list[_Flag] = []
    for word in given:
        if _FLAG.match(word):
            text, equals, value = word.partition("=")
            flags.append(_Flag(text, [value] if equals else []))
        else:
            (flags[-1].words if flags else leading).append(word)
    return leading, flags


def _values(flags: Iterable[_Flag]) -> dict[str, Any]:
    """Return {key: value} of the flags. Raises `RequestError` for an unknown flag or an invalid value."""
    known = {leaf.key: leaf for leaf in (*leaves(), _CONFIG)}
    known |= {f"no-{key}": leaf for key, leaf in known.items() if leaf.kind is bool}
    values: dict[str, Any] = {}
    for flag in flags:
        leaf = known.get(flag.name)
        for text in (flag.name.removeprefix("no-"), " ".join([flag.name, *flag.words])):
            if text in _GONE:
                raise RequestError(f"--{text} is gone: {_GONE[text]}.")
        if leaf is None:
            raise unknown("flag", flag.text, [f"--{name}" for name in known], "lockstep train --help lists all.")
        values[leaf.key] = _value(leaf, flag)
    return values


def _value(leaf: Leaf, flag: _Flag) -> Any:
    key, words = leaf.key, flag.words
    if leaf.kind is bool and words:
        raise RequestError(f"{flag.text} takes no value, found {words[0]!r}; write --{key} or --no-{key}.")
    if leaf.kind is bool:
        return flag.name == key
    if get_args(leaf.kind):
        return [_typed(leaf, flag.text, word) for word in words]
    _check_stray(words[1:])
    if not words:
        raise RequestError(f"{flag.text} lacks its value; give {leaf.takes}.")
    return _typed(leaf, flag.text, words[0])


def _typed(leaf: Leaf, flag: str, word: str) -> Any:
    kind = next(iter(get_args(leaf.kind)), leaf.kind)
    if leaf.optional and word.lower() == "none":
        return None
    try:
        return kind(word) if kind in (int, float) else word
    except ValueError:
        raise RequestError(f"{flag} {word or repr(word)}: give {leaf.takes}.") from None


def _check_stray(words: Iterable[object]) -> None:
    for word in words:
        raise RequestError(f"{word!r} belongs to no flag; a recipe comes first, as in lockstep train digits --lr 1.")


def _check_code(base: RunConfig, names: Collection[str], source: Path | None) -> None:
    """Raise `RequestError` for untrusted code: a file names it, no flag does. `names` are the flags given."""
    found = {key: value for key, value in flatten(base, NAMES_OF_CODE).items() if ":" in value and key not in names}
    if repeated := " ".join(f"--{key} {shlex.quote(value)}" for key, value in found.items()):
        raise RequestError(
            f"{shown(source)} names code of its own, which is imported only where the command line names it; if you "
            f"trust it, add {repeated}."
        )
