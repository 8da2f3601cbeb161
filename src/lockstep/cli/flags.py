"""Convert a command line to dataclasses, by tyro: a `RunConfig` from recipe, file and flags, or a verb's own flags."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, make_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import tyro

from ..config.options import NAMES_OF_CODE, apply, flatten, leaves, read_toml, recipe
from ..config.schema import RunConfig
from ..config.validity import Bounds, is_url
from ..data import sets
from ..errors import RequestError, unknown
from ..files import shown
from ..runs import folders
from . import output, usage

T = TypeVar("T")
_READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "milestones": ("schedule", ("step", "multistep")),
    "gamma": ("schedule", ("step", "multistep")),
    "momentum": ("optimizer", ("sgd", "muon", "lars")),
    "nesterov": ("optimizer", ("sgd", "muon")),
    "base-batch": ("lr-rule", ("linear", "sqrt")),
}
"""{flag: (the flag on which its effect depends, the values with which it has an effect)}"""
_FLAG = re.compile("--?[A-Za-z]")
"""The beginning of a flag, but not of a value such as a negative number."""


_TO_A_STORE = ("lockstep train", "lockstep run", "lockstep submit slurm", "lockstep submit kubernetes")
"""Commands whose runs can be copied to a store."""


def check_read(names: Iterable[str], config: RunConfig) -> None:
    """Raise `RequestError` for the first flag without effect in `config`. `names` have no dashes.

    Every flag of the command line needs an effect; a recipe or a file may set an option that a flag overrides.
    """
    values, readers = flatten(config), _READERS | {flag: ("data", names) for flag, names in sets.readers().items()}
    for flag in (flag for flag in names if flag in readers and values[flag] is not False):
        chooser, choices = readers[flag]
        choice = values[chooser]
        if choice not in (*choices, "auto") and ":" not in choice:  # the user's code may read any option
            advice = f"it belongs to {' and '.join(choices)}; leave it out, or choose another --{chooser}"
            raise RequestError(f"--{flag} has no effect with --{chooser} {choice}: {advice}.")


def parse(
    words: list[str],
    *,
    prog: str,
    base: RunConfig | None = None,
    source: Path | None = None,
    imports: Collection[str] = NAMES_OF_CODE,
    check: Callable[[Collection[str], RunConfig], None] = check_read,
) -> RunConfig:
    """Return the config of a command line, over `base`. Without a base, a recipe may come first.

    `source` is the file of `base`, and `imports` are the options whose code will be imported. `check` refuses flags
    without effect in the config, by their names without dashes.

    Raises `RequestError` for an unknown recipe, flag or value, with the nearest names; exits 0 after --help.
    """
    has_recipe = base is None and bool(words) and not _FLAG.match(words[0])
    base = recipe(words[0]) if has_recipe else base or RunConfig()
    options = (tyro.conf.OmitArgPrefixes,)
    if {"--help", "-h"} & {*words}:
        output.show(usage.text(prog.removeprefix("lockstep ").removesuffix(" RUN").replace(" ", "-"), base))
        raise SystemExit(0)
    names = _names(words, prog)
    # Of the last three, a URL is two options: `apply` resolves them.
    values, run_words = take(
        _merged(words[has_recipe:]),
        dict.fromkeys(("--config", "--output", "--remote", "--resume"), str),
        prog=prog,
    )
    if "--config" in values:
        source = Path(values["--config"])
        base = read_toml(source, base=base, through_links=True)
    _check_code({key: value for key, value in flatten(base, imports).items() if key not in names}, source)
    config = _parsed(lambda: tyro.cli(RunConfig, args=run_words, default=base, config=options), prog)
    config = apply(config, {name[2:]: value for name, value in values.items() if name != "--config"}, source=prog)
    check(names, config)
    if "--config" in values and source is not None:
        folders.check_meant(config, source)
    return config


def take(words: list[str], types: Mapping[str, type], *, prog: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a verb's flags, and the other words. `types` are bool, float, str; list for several values.

    Raises `RequestError` for a flag without its value, and for a number that is negative or infinite.
    """
    kinds: dict[Any, Any] = {bool: bool, list: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]}
    unset: dict[Any, Any] = {bool: False, list: ()}
    fields = [
        (name[2:].replace("-", "_"), kinds.get(kind, kind | None), field(default=unset.get(kind)))
        for name, kind in types.items()
    ]
    for word in words:
        if "=" in word and types.get(word.partition("=")[0].replace("_", "-")) is bool:
            raise RequestError(f"{word}: this flag takes no value.")  # tyro would take any value for true
    result: Any
    result, unknown_words = _parsed(
        lambda: tyro.cli(make_dataclass("Flags", fields), args=words, add_help=False, return_unknown_args=True), prog
    )
    values = {name: getattr(result, name[2:].replace("-", "_")) for name in types}
    urls = [f"{name} {values[name]}" for name in ("--output", "--remote") if is_url(values.get(name))]
    if urls and prog not in _TO_A_STORE:
        raise RequestError(f"{prog} {urls[0]}: it writes to local disks alone; give a path.")
    for name, value in values.items():
        if isinstance(value, float):
            Bounds(least=0).check(name[2:], value)
    return {name: value for name, value in values.items() if value not in (None, False, ())}, unknown_words


def _merged(words: list[str]) -> list[str]:
    """Return the words with the values of a repeated list, as in `--freeze A --freeze B`, behind its first flag."""
    lists = {leaf.key for leaf in leaves() if get_args(leaf.kind)}
    parts: dict[str | int, list[str]] = {}  # each flag with its values
    key: str | int = -1
    for number, word in enumerate(words):
        flag, _, value = word.partition("=")
        if not _FLAG.match(word):
            parts.setdefault(key, []).append(word)
        elif _name(flag) in lists:
            key = _name(flag)
            parts.setdefault(key, [flag]).extend([value] if value else [])
        else:
            key = number
            parts[key] = [word]
    return [word for part in parts.values() for word in part]


def without(words: list[str], names: Collection[str]) -> list[str]:
    """Return the words without these flags and their values. `names` have no dashes."""
    result, is_dropped = list[str](), False
    for word in words:
        if _FLAG.match(word):
            is_dropped = _name(word) in names
        if not is_dropped:
            result.append(word)
    return result


def _name(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("_", "-")


def _names(words: list[str], prog: str) -> list[str]:
    """Return the flags of a command line, without dashes and no-.

    Raises `RequestError` for an unknown flag, and for errors that tyro accepts: a value of a switch, an empty path.
    """
    kinds = {leaf.key: leaf.kind for leaf in leaves()} | {"config": Path}
    names = []
    for word, following in zip(words, [*words[1:], None], strict=False):
        if not _FLAG.match(word):
            continue
        key = _name(word) if _name(word) in kinds else _name(word).removeprefix("no-")
        if key not in kinds:
            raise unknown("flag", word.partition("=")[0], [f"--{kind}" for kind in kinds], f"{prog} --help lists all.")
        if kinds[key] is bool and "=" in word:
            raise RequestError(f"{word}: this flag takes no value; write --{key} or --no-{key}.")
        if kinds[key] is Path and (word.endswith("=") or following == ""):
            raise RequestError(f"--{key} needs a value; give a path.")
        names.append(key)
    return names


def _parsed(call: Callable[[], T], prog: str) -> T:
    """Return the result of tyro's parser. Raises `RequestError` with tyro's message."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return call()
    except SystemExit as error:
        _, *lines = [line.strip(" │|") for line in message.getvalue().splitlines()]  # in a box, under a title
        shown = takewhile(lambda line: not line.startswith(("Argument help", "For full help", "Got errors")), lines)
        sentence = " ".join(line for line in shown if re.search(r"\w", line)).removesuffix(".")
        raise RequestError(f"{sentence}; {prog} --help lists all.") from error


def _check_code(values: Mapping[str, str | list[str]], source: Path | None) -> None:
    """Raise `RequestError` for untrusted code, which a file names but no flag. `values` are those that no flag set."""
    lists = {key: [value] if isinstance(value, str) else value for key, value in values.items()}
    untrusted = {key: words for key, words in lists.items() if any(":" in word for word in words)}
    if repeated := " ".join(f"--{key} {shlex.quote(word)}" for key, words in untrusted.items() for word in words):
        raise RequestError(
            f"{shown(source)} names code, which is imported only if the command line names it; if you trust it, add "
            f"{repeated}."
        )
