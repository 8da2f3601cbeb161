"""From the command line to a `RunConfig`: recipe, then file, then flags.

tyro makes the command line of the dataclasses, so that there is no other list of flags. What it would refuse in a box
of its own is looked for beforehand, and said in a sentence.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import tyro

from ..config.options import Leaf, code, leaves, read_toml, recipe
from ..config.schema import RunConfig
from ..errors import RequestError, unknown
from ..files import shown
from ..runs import folders
from . import output, unread

_HELP = ("--help", "-h")
_TRAIN = "lockstep train"
"""Whose --help lists the flags of a run, wherever they may stand."""


@dataclass(frozen=True)
class Arguments:
    """Train one model on any number of devices. With --dry-run: print what would run, and where, and start nothing."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")]
    recipe: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[RECIPE]")] = None
    """A recipe's name (lockstep info lists them); flags and --config beat its values."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """A TOML file with options by their flags' names; flags beat it, it beats the recipe."""


@dataclass(frozen=True)
class _Flag:
    """A flag as it was written, such as --data_dir, and the words up to the next one."""

    text: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.text.removeprefix("--").replace("_", "-")


def parse(
    given: list[str],
    *,
    prog: str,
    base: RunConfig | None = None,
    source: Path | None = None,
    imports: bool = True,
    check: Callable[[Collection[str], RunConfig], None] = unread.check,
) -> RunConfig:
    """Return the config that the arguments ask for, over `base`; without a base, a recipe may come first.

    `source` is the file that `base` was read from, and `imports` whether the config's code will be imported. `check`
    refuses flags, by their names without dashes, that would have no effect in the config.

    Raises `RequestError` for what is no recipe, flag or value, with the nearest names; exits 0 after --help.
    """
    leading, flags = _read(given)
    named = leading[:1] if base is None else []
    listing = advice = f"{_TRAIN if base is None else ' '.join(prog.split()[:2])} --help lists all."
    if base is None and not named:
        advice = "a recipe comes first, as in lockstep train digits --batch 64."
    _check_stray(leading[len(named) :], advice)
    known = {leaf.key: leaf for leaf in leaves()}
    canonical = [word for flag in flags for word in _checked(flag, known, advice, listing)]
    base = recipe(named[0]) if named else base or RunConfig()
    for flag in flags:
        if flag.text == "--config":
            source = Path(flag.words[0])
            base = read_toml(source, base=base, through_links=True)
    with output.written():  # the help, if it is asked for
        arguments = tyro.cli(
            Arguments,
            args=[*named, *canonical],
            prog=prog,
            default=Arguments(run=base),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    names = [flag.name.removeprefix("no-") for flag in flags]
    if imports:
        _check_code(code(base), names, source)
    check(names, arguments.run)
    if "config" in names and source is not None:
        folders.check_meant(arguments.run, source)
    return arguments.run


def _check_code(found: Mapping[str, str], names: Collection[str], source: Path | None) -> None:
    """Raise `RequestError` for code that a file names, which may be anybody's, and no flag of these `names` does."""
    if repeated := " ".join(f"--{key} {shlex.quote(value)}" for key, value in found.items() if key not in names):
        raise RequestError(
            f"{shown(source)} names code of its own, which is imported only where the command line names it; if you "
            f"trust it, add {repeated}."
        )


def without(given: list[str], names: Collection[str]) -> list[str]:
    """Return the words `given` without the flags of these names (without dashes) and their values."""
    leading, flags = _read(given)
    kept = [flag for flag in flags if flag.name not in names]
    return [*leading, *(word for flag in kept for word in (flag.text, *flag.words))]


def _read(given: list[str]) -> tuple[list[str], list[_Flag]]:
    """Return the words before the first flag, and the flags."""
    leading: list[str] = []
    flags: list[_Flag] = []
    for word in given:
        if _is_flag(word):
            text, equals, value = word.partition("=")
            flags.append(_Flag(text, (value,) if equals else ()))
        elif flags:
            flags[-1] = _Flag(flags[-1].text, (*flags[-1].words, word))
        else:
            leading.append(word)
    return leading, flags


def _is_flag(word: str) -> bool:
    """Whether a word is a flag and no value, such as a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _checked(flag: _Flag, known: Mapping[str, Leaf], advice: str, listing: str) -> list[str]:
    """Return the flag with its words as tyro takes them.

    `advice` is what to do about a word that is too many, and `listing` says where all flags stand.
    Raises `RequestError` where there is no such flag or value.
    """
    if flag.text in _HELP:
        return [flag.text]
    if flag.text == "--config":
        _check_one(flag, "a path", advice)
        return [flag.text, *flag.words]
    switches = {f"{no}{key}" for key, leaf in known.items() if leaf.kind is bool for no in ("", "no-")}
    if not flag.text.startswith("--") or flag.name not in (known.keys() | switches):
        raise unknown("flag", flag.text, [f"--{name}" for name in sorted({*known, *switches, "config"})], listing)
    if flag.name in switches:
        _check_switch(flag, advice)
        return [f"--{flag.name}"]
    leaf = known[flag.name]
    if not get_args(leaf.kind):
        _check_one(flag, leaf.takes, advice)
    words = ["None" if leaf.optional and word.lower() == "none" else word for word in flag.words]
    for word in words:
        _check_word(flag, leaf, word)
    return [f"--{leaf.key}", *words] if get_args(leaf.kind) else [f"--{leaf.key}={words[0]}"]


def _check_one(flag: _Flag, takes: str, advice: str) -> None:
    if not flag.words:
        raise RequestError(f"{flag.text} lacks its value; give {takes}.")
    _check_stray(flag.words[1:], advice)


def _check_switch(flag: _Flag, advice: str) -> None:
    if flag.words and flag.words[0].lower() in ("true", "false", "yes", "no", "on", "off", "0", "1", ""):
        name = flag.name.removeprefix("no-")
        raise RequestError(f"{flag.text} takes no value, found {flag.words[0]!r}; write --{name} or --no-{name}.")
    _check_stray(flag.words, advice)


def _check_word(flag: _Flag, leaf: Leaf, word: str) -> None:
    """Raise `RequestError` where a word is not a value of the leaf's kind."""
    kind = next(iter(get_args(leaf.kind)), leaf.kind)
    if leaf.optional and word == "None":
        return
    try:
        if kind in (int, float):
            kind(word)
        elif kind is Path and not word:
            raise ValueError
    except ValueError:
        raise RequestError(f"{flag.text} {word or repr(word)}: give {leaf.takes}.") from None


def _check_stray(words: Iterable[str], advice: str) -> None:
    for word in words:
        raise RequestError(f"{word!r} belongs to no flag; {advice}")
