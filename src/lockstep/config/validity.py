"""Options read from dataclass fields: key, type and permitted values."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from ..errors import RequestError, choose

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", Path: "a path"}
_LISTS = {str: "a list of words", float: "a list of numbers"}
_METAVARS = {int: "N", float: "X", bool: "", str: "NAME", Path: "PATH"}


def require(holds: bool, sentence: str) -> None:
    """Raise `RequestError` with `sentence` unless it `holds`."""
    if not holds:
        raise RequestError(sentence)


def is_url(value: Any) -> bool:
    """Return whether a value is the URL of a folder in a store, such as s3://bucket/run."""
    return isinstance(value, str) and "://" in value


@dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes; by default all finite ones."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def check(self, flag: str, value: float) -> None:
        """Raise `RequestError` for a number outside the bounds."""
        require(-math.inf < value < math.inf, f"--{flag} {value}: give a finite number.")
        require(value >= self.least, f"--{flag} {value}: give {self.least:,} or more.")
        require(value > self.above, f"--{flag} {value}: give a number above {self.above:,}.")
        require(value < self.below, f"--{flag} {value}: give a number below {self.below:,}.")


@dataclass(frozen=True, eq=False)
class OneOf:
    """The permitted words: those of a table, which may grow, and `extra`."""

    words: Collection[str]
    extra: tuple[str, ...] = ()

    def check(self, flag: str, value: str) -> None:
        """Raise `RequestError`, with the nearest words, for any other word."""
        choose(f"--{flag}", value, (*self.extra, *self.words))


_USUAL = {int: Bounds(least=1, below=2**63), float: Bounds()}


@dataclass(frozen=True)
class Leaf:
    """One option: its public `key`, and its place in the config. `section` None is the config itself."""

    key: str
    section: str | None
    attribute: str
    kind: Any  # the type of its values: int, float, bool, str, Path, or a tuple of str or float
    optional: bool  # it may be unset
    rule: Bounds | OneOf | None
    metavar: str
    """What stands for a value in the help."""

    @property
    def takes(self) -> str:
        """The permitted type of values, in words."""
        return _LISTS[get_args(self.kind)[0]] if get_args(self.kind) else _NAMES[self.kind]

    def of(self, config: object) -> Any:
        """Return the option's value in a config."""
        return getattr(getattr(config, self.section) if self.section else config, self.attribute)


@functools.cache
def leaves_of(owner: type, section: str | None = None) -> tuple[Leaf, ...]:
    """Return the options of a dataclass and its nested dataclasses, in order."""
    leaves: list[Leaf] = []
    for name, hint in get_type_hints(owner, include_extras=True).items():
        plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(plain):
            leaves += leaves_of(plain, name)  # type: ignore[arg-type]
            continue
        optional = NoneType in get_args(plain)
        kind = get_args(plain)[0] if optional else plain
        rules = [mark for mark in marks if isinstance(mark, Bounds | OneOf)]
        usual = _USUAL.get(next(iter(get_args(kind)), kind))
        keys = [mark.name for mark in marks if getattr(mark, "name", None)]
        key = [*keys, name.replace("_", "-")][0]
        metavars = [mark.metavar for mark in marks if getattr(mark, "metavar", None)]
        metavar = [_METAVARS.get(kind, "VALUE …"), *metavars][-1]
        leaves.append(Leaf(key, section, name, kind, optional, [*rules, usual][0], metavar))
    return tuple(leaves)


def check(config: Any) -> None:
    """Raise `RequestError` for the first option with a value outside its rule."""
    for leaf in leaves_of(type(config)):  # type: ignore[arg-type]
        value = leaf.of(config)
        for item in value if isinstance(value, tuple) else () if value is None else (value,):
            if leaf.rule is not None:
                leaf.rule.check(leaf.key, item)
