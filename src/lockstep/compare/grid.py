"""The variants of one job: every combination of the values that options take, and why some of them cannot be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config import RunConfig
from ..errors import RequestError, counted, unknown
from ..kinds import KINDS
from ..launchers import table
from ..options import leaves

MOST = 64
"""Variants that are run without --yes."""
_NUMBER = re.compile(r"[\d.e+-]+")
Words = tuple[str, ...]
_WAYS = ("strategy", "devices")
_DECIDED = ("output", "resume", "eval-every", "quiet")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant: the flags that make it, and its config; or why there is none."""

    name: str
    flags: Words
    options: Mapping[str, str] = field(default_factory=dict)
    """What varies, by option."""
    config: RunConfig | None = None
    why_not: str = ""

    def is_alone_of(self, other: Cell) -> bool:
        """Whether this is, but for the strategy, the other one on one device."""
        mine, theirs = ({k: v for k, v in each.options.items() if k not in _WAYS} for each in (self, other))
        if self.config is None or mine != theirs:
            return False
        return self.config.parallel.devices == 1 or self.config.parallel.strategy == "single"


def axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Return {option: its values} of words such as "devices=1,2".

    Raises `RequestError` for a word that is none such, and for what is no option, with the nearest names.
    """
    known = {leaf.key: leaf.kind for leaf in leaves()}
    found: dict[str, list[str]] = {}
    for word in vary:
        key, equals, text = word.partition("=")
        key = key.strip().removeprefix("--").replace("_", "-")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not equals or not values:
            raise RequestError(f"--vary {word}: give an option and its values, as in --vary devices=1,2.")
        if key not in known:
            raise unknown(
                "option of --vary", key, known, "lockstep train --help lists all; a script's own flags do not vary."
            )
        if key in _DECIDED:
            raise RequestError(f"--vary {key}: the comparison itself decides on that; leave it out.")
        if key in found:
            raise RequestError(f"--vary {key} was given twice; give all its values at once.")
        if known[key] is bool and not {*values} <= {"true", "false"}:
            raise RequestError(f"--vary {word}: give true, false or both.")
        found[key] = list(dict.fromkeys(values))
    return found


def cells(
    varied: dict[str, list[str]], parse: Callable[[Words], RunConfig], *, weak: bool = False, yes: bool = False
) -> list[Cell]:
    """Return a cell for each combination; `parse` returns the config of these flags over the job's own.

    With `weak`, the global batch grows with the devices. Raises `RequestError` where there are over `MOST` and nobody
    has said `yes`, and where none of them can be.
    """
    combined = list(itertools.product(*varied.values()))
    if len(combined) > MOST and not yes:
        raise RequestError(f"--vary asks for {len(combined)} variants; vary less, or add --yes where you mean it.")
    found: list[Cell] = []
    for values in combined:
        options = dict(zip(varied, values, strict=True))
        flags = tuple(word for key, value in options.items() for word in words(key, value))
        lone = len(options) == 1  # a number by itself does not tell what it is of
        name = "-".join(
            f"{key}-{value}" if value in ("true", "false") or (lone and _NUMBER.fullmatch(value)) else value
            for key, value in options.items()
        )
        found.append(_parsed(Cell(name=name or "as it is", flags=flags, options=options), parse, weak=weak))
    if all(cell.why_not for cell in found):
        raise RequestError(f"None of {counted(len(found), 'variant')} can be run; {found[0].name}: {found[0].why_not}")
    return found


def words(key: str, value: str) -> Words:
    """Return the option as flags."""
    if value == "true":
        return (f"--{key}",)
    return (f"--no-{key}",) if value == "false" else (f"--{key}", value)


def _parsed(cell: Cell, parse: Callable[[Words], RunConfig], *, weak: bool) -> Cell:
    """Return the cell with its config, or with the reason why it has none."""
    flags = cell.flags
    try:
        config = parse(flags)
        asked = config.parallel
        if weak and asked.devices is None and asked.strategy != "single":
            raise RequestError("--scaling weak has to know how many devices: give --devices, or --vary devices=1,2.")
        if weak and (devices := asked.devices or 1) > 1:
            flags = (*flags, "--batch", str(config.batch.size * devices))
            config = parse(flags)
        reason = _contradiction(config)
    except RequestError as error:
        return replace(cell, flags=flags, why_not=str(error))
    return replace(cell, flags=flags, why_not=reason, config=None if reason else config)


def _contradiction(config: RunConfig) -> str:
    """Return why the devices and the strategy of a grid's cell do not go together; "" where they do."""
    asked = config.parallel
    devices, kind = asked.devices, KINDS.get(asked.strategy)
    if kind is None:
        return ""  # the job itself finds out what there is
    if devices is None:
        is_one = kind.process_per_device and table.least_ranks(config) == 1
        return f"{asked.strategy} on one device is what single is; give --devices." if is_one else ""
    if devices > 1 and not (kind.has_ranks or kind.drives_all):
        return f"{asked.strategy} is one device, and {devices} were asked for."
    if devices == 1 and (kind.has_ranks or kind.drives_all):
        return f"{asked.strategy} on one device is what single is."
    if kind.has_two_levels:
        return f"{asked.strategy} needs several nodes, which are started by hand."
    return ""


def usual(
    cpus: int, gpus: int, *, has_bf16: bool, is_script: bool, given: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Return what is varied where nobody says: the ways to train that make sense on this machine.

    `given` is what the job's own flags ask for, by option: of the ways, that one is compared with one device, and a
    precision that was asked for is the only one.
    """
    given = given or {}
    several = gpus or min(max(2, cpus), 4)
    ways = [name for name, kind in KINDS.items() if name != "single" and not kind.has_two_levels]
    found = {
        "strategy": [] if is_script else ["single", *([given["strategy"]] if "strategy" in given else ways)],
        "devices": ["1", given.get("devices", str(several))],
        "precision": ["fp32", "bf16"] if (has_bf16 or gpus) and "precision" not in given else [],
    }
    found = {key: list(dict.fromkeys(values)) for key, values in found.items()}
    if len(found["devices"]) == 1:
        del found["strategy"]  # all are what single is
    return {key: values for key, values in found.items() if len(values) > 1}
