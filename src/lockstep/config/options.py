"""A run's options by public key. In TOML, in recipes, and in `override(config, batch=256)`."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import tomli_w

from ..errors import RequestError, unknown
from ..files import read, understanding
from ..printable import visible_json
from .schema import RunConfig
from .validity import Leaf, is_url, leaves_of

RUNS = Path("runs")
"""The folder of runs that have no --output."""
OWN_TO_A_RANK = (
    *("rank", "gpus", "devices", "data-dir", "output", "init-method", "interface", "launcher"),
    *("workers", "on-device"),
)
"""Options that may differ between ranks started by hand: their identity and place. All others define the run."""
NAMES_OF_CODE = ("model", "data", "loss", "step", "metric", "collate", "track")
"""Options that may name code of the user's own, as module:attribute."""
IDENTITY = (
    *("model", "classes", "init-from", "freeze"),
    *("data", "augment", "image-size", "samples", "holdout"),
    *("optimizer", "lr", "lr-scale", "momentum", "nesterov", "weight-decay", "schedule", "milestones", "gamma"),
    *("warmup", "lr-rule", "base-batch", "clip", "loss", "step", "collate", "label-smoothing", "ema"),
    *("batch", "drop-last", "draws", "seed"),
)
"""The options that make a run the run it is: others (strategy, devices, epochs, precision …) may change on resuming."""
OF_A_SESSION = (
    *("output", "remote", "resume", "checkpoint-every", "keep", "log-every", "profile", "verify-every", "ledger"),
    *("seed", "max-steps", "accumulate", "micro-batch", "draws", "batchnorm"),
    *("strategy", "shard-modules", "shard-size", "shard-reshard"),
    *("exchange", "exchange-every", "powersgd-rank", "powersgd-start", "precision", "deterministic"),
    *("checkpoint-activations", "timeout", "stall-timeout", "collectives", "track"),
)
"""The options of `lockstep train` that a session takes; on all else the script decides."""
_COMMAND_SECTIONS = ("parallel", "checkpoint", "record")
"""Sections whose options a script leaves to the command."""
_MOST_BYTES, _DOTS = 1 << 18, 200
"""Of a TOML file, and in one line of it: each level of a dotted key costs tomllib as much as all those before it."""


def leaves() -> tuple[Leaf, ...]:
    """Return every option of a run, in the order of the dataclasses."""
    return leaves_of(RunConfig)


def left_to_command() -> set[str]:
    """List the options that a script leaves to the command."""
    return {leaf.key for leaf in leaves() if leaf.section in _COMMAND_SECTIONS or leaf.key in OF_A_SESSION}


def flatten(config: RunConfig, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return {public key: value} of the options in `only`, or of all. Paths become text, tuples lists."""
    flat = {}
    for leaf in leaves():
        if only is None or leaf.key in only:
            value = leaf.of(config)
            plain = list(value) if isinstance(value, tuple) else value
            flat[leaf.key] = str(plain) if isinstance(plain, Path) else plain
    return flat


def flatten_common(config: RunConfig) -> dict[str, Any]:
    """Return {public key: value} of the options that all ranks must share."""
    return {key: value for key, value in flatten(config).items() if key not in OWN_TO_A_RANK}


def override(config: RunConfig, **values: Any) -> RunConfig:
    """Return `config` with options replaced by their public keys (`batch=256, data_dir="data"`).

    Raises `RequestError` for an unknown key, a value of another type, or a value that cannot be honoured.
    """
    return apply(config, values, source="override")


def apply(config: RunConfig, values: Mapping[str, Any], *, source: str) -> RunConfig:
    """Return `config` with `{public key: value}` applied; errors name `source` as their origin."""
    leaves_by_key = {leaf.key: leaf for leaf in leaves()}
    sections: dict[str | None, dict[str, Any]] = {}
    for name, value in _place(config, values).items():
        leaf = leaves_by_key.get(name.replace("_", "-"))
        if leaf is None:
            raise unknown(f"option in {source}", name, leaves_by_key, "lockstep train --help lists all.")
        try:
            converted = None if value is None and leaf.optional else _as(leaf.kind, value)
        except (TypeError, OverflowError):
            text = json.dumps(value, default=str, ensure_ascii=False)
            raise RequestError(f"{leaf.key} in {source} is {text}; it takes {leaf.takes}.") from None
        sections.setdefault(leaf.section, {})[leaf.attribute] = converted
    top = sections.pop(None, {})
    parts = {name: dataclasses.replace(getattr(config, name), **new) for name, new in sections.items() if name}
    return dataclasses.replace(config, **parts, **top)


def _place(config: RunConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values with the store and the local folder that follow from a URL in them."""
    urls = {key: values[key].rstrip("/") for key in ("output", "remote", "resume") if is_url(values.get(key))}
    if not urls:
        return values
    stores = urls if "remote" in values or not config.record.remote else {"remote": config.record.remote, **urls}
    url = next(iter(stores.values()))
    if any(store != url for store in stores.values()):
        flags = " and ".join(f"--{key} {value}" for key, value in stores.items())
        raise RequestError(f"{flags}: a run has one folder in a store; give one URL.")
    resolved = {**values, **urls, "remote": url}
    if "output" in urls or not (values.get("output") or config.record.output):
        resolved["output"] = local_folder(url)
    return resolved


def local_folder(url: str) -> Path:
    """Return the local folder of a run in a store: runs/s3.bucket.run of s3://bucket/run."""
    return RUNS / re.sub(r"[^\w.-]+", ".", url.rstrip("/"))


def _as(kind: Any, value: Any) -> Any:
    """Return `value` as `kind`. TOML has no paths or tuples, and an integer may stand for a float or a word."""
    if kind is Path and isinstance(value, str | Path) and value != "":
        return Path(value)
    if kind in (float, str) and type(value) is int:
        return kind(value)
    if get_args(kind) and isinstance(value, list | tuple):
        return tuple(_as(get_args(kind)[0], item) for item in value)
    if type(value) is kind:  # exactly: a bool is no number here
        return value
    raise TypeError(kind)


def to_toml(config: RunConfig, only: Collection[str] | None = None) -> str:
    """Return the options in `only`, or all, as TOML for `from_toml`. Unset options are left out."""
    values = {key: value for key, value in flatten(config, only).items() if value is not None}
    return visible_json(tomli_w.dumps(values))


def from_toml(text: str, *, base: RunConfig | None = None, source: str = "TOML") -> RunConfig:
    """Return `base` (by default RunConfig()) with the options in `text`.

    Raises `RequestError` if the text is not TOML or an option is unknown or of another type.
    """
    return apply(base or RunConfig(), _parsed(text, source), source=source)


def _parsed(text: str, source: str) -> dict[str, Any]:
    if any(line.count(".") > _DOTS for line in text.splitlines()):
        raise RequestError(f"{source} is not valid: a line has more than {_DOTS} dots.")
    with understanding(Path(source), "repair it"):
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"{source} is not valid TOML: {error}.") from error


def read_toml(path: Path, *, base: RunConfig | None = None, through_links: bool = False) -> RunConfig:
    """Return the config in the file at `path`, over `base`. `through_links` is for a path that the user named.

    Raises `RequestError` if the file cannot be read or `from_toml` refuses the text.
    """
    return from_toml(_text(path, through_links=through_links), base=base, source=str(path))


def read_named(path: Path) -> dict[str, Any]:
    """Return {public key: value} of the options in a run's config.toml. Raises as `read_toml`."""
    return flatten(read_toml(path), _parsed(_text(path), str(path)))


def _text(path: Path, *, through_links: bool = False) -> str:
    with understanding(path, "repair it"):
        return read(path, most_bytes=_MOST_BYTES, through_links=through_links).decode()


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
