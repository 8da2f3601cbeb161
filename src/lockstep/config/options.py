"""The options of a run by their public keys: in TOML, in recipes, and in `override(config, batch=256)`.

The dataclasses of `config` are the one list of options; here their leaves are found by key. A file, a recipe or a
call names some of them, and a whole config with those replaced comes out, checked like any other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tomli_w

from ..errors import RequestError, unknown
from ..files import read, understanding
from ..printable import visible_json
from .schema import RunConfig

OWN_TO_A_RANK = frozenset(
    {
        *("rank", "gpus", "devices", "data-dir", "output", "init-method", "clear-meeting", "interface", "launcher"),
        *("workers", "on-device"),
    }
)
"""Options in which ranks that people start by hand may differ: who and where they are. All others make the run."""
NAMES_OF_CODE = ("model", "data", "loss", "step", "metric", "collate")
"""Options that may name code of the user's own, as module:attribute."""

IDENTITY = (
    *("model", "classes", "init-from", "freeze"),
    *("data", "augment", "image-size", "samples", "holdout"),
    *("optimizer", "lr", "lr-scale", "momentum", "nesterov", "weight-decay", "schedule", "milestones", "gamma"),
    *("warmup", "lr-rule", "base-batch", "clip", "loss", "step", "collate", "label-smoothing", "ema"),
    *("batch", "drop-last", "seed"),
)
"""The options that make a run the run it is: others (strategy, devices, epochs, precision …) may change on resuming."""
_MOST_BYTES, _DOTS = 1 << 18, 200
"""Of a TOML file, and in one line of it."""


@dataclass(frozen=True)
class Leaf:
    """One option: its public `key`, the config `section` it lives in (None: RunConfig itself), and its attribute."""

    key: str
    section: str | None
    attribute: str
    kind: Any
    """The type of its values: int, float, bool, str, Path, or a tuple of str or float."""
    optional: bool
    """Whether it may be unset."""

    @property
    def takes(self) -> str:
        """What its values are, in words."""
        one = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", Path: "a path"}
        lists = {str: "a list of words", float: "a list of numbers"}
        items = get_args(self.kind)
        return lists[items[0]] if items else one[self.kind]


@functools.cache
def leaves() -> tuple[Leaf, ...]:
    """Return every option of a run, in the order of the dataclasses."""

    def of(owner: type, section: str | None) -> Iterator[Leaf]:
        hints = get_type_hints(owner, include_extras=True)
        for item in dataclasses.fields(owner):
            hint = hints[item.name]
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                yield from of(hint, item.name)
                continue
            plain, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            named = [mark.name for mark in marks if mark.name]
            set_kinds = [kind for kind in get_args(plain) if kind is not NoneType]
            optional = NoneType in get_args(plain)
            yield Leaf(
                key=named[0] if named else item.name.replace("_", "-"),
                section=section,
                attribute=item.name,
                kind=set_kinds[0] if optional else plain,
                optional=optional,
            )

    return tuple(of(RunConfig, None))


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return {public key: value} of every option, paths and tuples as TOML and JSON hold them."""
    flat = {}
    for leaf in leaves():
        owner = getattr(config, leaf.section) if leaf.section else config
        value = getattr(owner, leaf.attribute)
        flat[leaf.key] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return flat


def flatten_common(config: RunConfig) -> dict[str, Any]:
    """Return {public key: value} of the options that all ranks of a run have to share."""
    return {key: value for key, value in flatten(config).items() if key not in OWN_TO_A_RANK}


def code(config: RunConfig) -> dict[str, str]:
    """Return {public key: module:attribute} of the options that name code of the user's own."""
    named = {key: value for key, value in flatten(config).items() if key in NAMES_OF_CODE}
    return {key: value for key, value in named.items() if ":" in value}


def override(config: RunConfig, **values: Any) -> RunConfig:
    """Return `config` with options replaced by their public keys (`batch=256, data_dir="data"`).

    Raises `RequestError` for a key that no option has, a value of another type, or one that cannot be honoured.
    """
    return apply(config, values, source="override")


def apply(config: RunConfig, values: Mapping[str, Any], *, source: str) -> RunConfig:
    """Return `config` with `{public key: value}` applied; `source` names their origin in errors."""
    known = {leaf.key: leaf for leaf in leaves()}
    sections: dict[str | None, dict[str, Any]] = {}
    for name, value in values.items():
        leaf = known.get(name.replace("_", "-"))
        if leaf is None:
            raise unknown(f"option in {source}", name, known, "lockstep train --help lists all.")
        sections.setdefault(leaf.section, {})[leaf.attribute] = _coerce(leaf, value, source)
    top = sections.pop(None, {})
    # A section is built once with all its new values, so that options which check one another agree.
    parts = {name: dataclasses.replace(getattr(config, name), **new) for name, new in sections.items() if name}
    return dataclasses.replace(config, **parts, **top)


def _coerce(leaf: Leaf, value: Any, source: str) -> Any:
    """Return `value` as the leaf holds it, or raise `RequestError`."""
    if value is None and leaf.optional:
        return None
    if leaf.kind is str and type(value) is int:  # a word that can be a number: nodes = 2, gpus = 0
        return str(value)
    try:
        return _as(leaf.kind, value)
    except (TypeError, OverflowError):
        shown = json.dumps(value, default=str, ensure_ascii=False)
        raise RequestError(f"{leaf.key} in {source} is {shown}; it takes {leaf.takes}.") from None


def _as(kind: Any, value: Any) -> Any:
    """Return `value` as `kind`: TOML has no paths and tuples, and writes 1 where 1.0 is meant. Raises TypeError."""
    if kind is Path and isinstance(value, str | Path) and value != "":
        return Path(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if get_args(kind) and isinstance(value, list | tuple):
        return tuple(_as(get_args(kind)[0], each) for each in value)
    if type(value) is kind:  # exactly: a bool is no number here
        return value
    raise TypeError(kind)


def to_toml(config: RunConfig, only: Collection[str] | None = None) -> str:
    """Return the config as TOML that `from_toml` reads back to an equal config; unset options are left out.

    With `only`, the other options are left out as well.
    """
    return visible_json(
        tomli_w.dumps({key: value for key, value in recorded(config, only).items() if value is not None})
    )


def recorded(config: RunConfig, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return {public key: value} of the options in `only`, or of all."""
    return {key: value for key, value in flatten(config).items() if only is None or key in only}


def from_toml(text: str, *, base: RunConfig | None = None, source: str = "TOML") -> RunConfig:
    """Return `base` (by default RunConfig()) with the options in `text`.

    Raises `RequestError` where the text is not TOML or an option is unknown or of another type.
    """
    # No option is nested, and each level of a key costs tomllib as much as all those before it.
    if any(line.count(".") > _DOTS for line in text.splitlines()):
        raise RequestError(f"{source} is not valid: a line has more than {_DOTS} dots.")
    with understanding(Path(source), "mend it"):
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"{source} is not valid TOML: {error}.") from error
        return apply(base or RunConfig(), values, source=source)


def read_toml(path: Path, *, base: RunConfig | None = None, through_links: bool = False) -> RunConfig:
    """Return the config in the file at `path`, over `base`; `through_links` where the user has named it.

    Raises `RequestError` where it cannot be read or `from_toml` refuses it.
    """
    try:
        text = read(path, most_bytes=_MOST_BYTES, through_links=through_links).decode()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} cannot be read: it is not text in UTF-8.") from error
    return from_toml(text, base=base, source=str(path))


def read_named(path: Path) -> dict[str, Any]:
    """Return {public key: value} of the options that a run's config.toml names; raises what `read_toml` does."""
    config = read_toml(path)
    return recorded(config, tomllib.loads(read(path).decode()))


def recipes() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = resources.files("lockstep") / "recipes"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def recipe(name: str, **values: Any) -> RunConfig:
    """Return the named recipe, with options replaced by their public keys."""
    if name not in (names := recipes()):
        raise unknown("recipe", name, names, "Your own file goes with --config FILE.toml.")
    text = (resources.files("lockstep") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    return override(from_toml(text, source=f"recipe {name}"), **values)
