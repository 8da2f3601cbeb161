"""The variants of one job: every combination of the values that options take, and why some of them cannot be."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import RunConfig
from ..errors import RequestError, counted, unknown
from ..kinds import KINDS
from ..options import leaves

MOST = 64
"""Variants that are run without --yes."""
Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant: the flags that make it, and its config; or why there is none."""

    name: str
    flags: Words
    config: RunConfig | None = None
    why_not: str = ""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return 1 if self.config is None else self.config.parallel.devices or 1


def axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Return {option: its values} of words such as "devices=1,2".

    Raises `RequestError` for a word that is none such, and for what is no option, with the nearest names.
    """
    known = {leaf.key for leaf in leaves()}
    found: dict[str, list[str]] = {}
    for word in vary:
        key, equals, text = word.partition("=")
        key = key.strip().removeprefix("--").replace("_", "-")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not equals or not values:
            raise RequestError(f"--vary {word}: give an option and its values, as in --vary devices=1,2.")
        if key not in known:
            raise unknown("option of --vary", key, known, "lockstep train --help lists all.")
        if key in found:
            raise RequestError(f"--vary {key} was given twice; give all its values at once.")
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
        flags = tuple(word for key, value in zip(varied, values, strict=True) for word in (f"--{key}", value))
        cell = Cell(name="-".join(values) or "as it is", flags=flags)
        found.append(_parsed(cell, parse, weak=weak))
    if all(cell.why_not for cell in found):
        raise RequestError(f"None of {counted(len(found), 'variant')} can be run; {found[0].name}: {found[0].why_not}")
    return found


def _parsed(cell: Cell, parse: Callable[[Words], RunConfig], *, weak: bool) -> Cell:
    """Return the cell with its config, or with the reason why it has none."""
    flags = cell.flags
    try:
        config = parse(flags)
        if weak and (devices := config.parallel.devices or 1) > 1:
            flags = (*flags, "--batch", str(config.batch.size * devices))
            config = parse(flags)
        if reason := _contradiction(config):
            return Cell(name=cell.name, flags=flags, why_not=reason)
    except RequestError as error:
        return Cell(name=cell.name, flags=flags, why_not=str(error))
    return Cell(name=cell.name, flags=flags, config=config)


def _contradiction(config: RunConfig) -> str:
    """Return why the devices and the strategy of a grid's cell do not go together; "" where they do."""
    asked = config.parallel
    devices, kind = asked.devices or 1, KINDS.get(asked.strategy)
    if kind is None:
        return ""
    if devices > 1 and not (kind.has_ranks or kind.drives_all):
        return f"{asked.strategy} is one device, and {devices} were asked for."
    if devices == 1 and (kind.has_ranks or kind.drives_all):
        return f"{asked.strategy} on one device is what single is."
    if kind.has_two_levels:
        return f"{asked.strategy} needs several nodes, which are started by hand."
    return ""


def usual(cpus: int, gpus: int, *, has_bf16: bool, is_script: bool) -> dict[str, list[str]]:
    """Return what is varied where nobody says: the ways to train that make sense on this machine."""
    several = max(2, gpus) if gpus != 1 else 1
    if gpus == 0:
        several = min(max(2, cpus), 4)
    if is_script:
        found = {"devices": ["1", str(several)]}
    else:
        found = {
            "strategy": ["single", *(name for name, kind in KINDS.items() if _fits(name, kind.has_two_levels))],
            "devices": ["1", str(several)],
        }
    if has_bf16 or gpus:
        found["precision"] = ["fp32", "bf16"]
    return {key: values for key, values in found.items() if len(values) > 1}


def _fits(name: str, has_two_levels: bool) -> bool:
    return name != "single" and not has_two_levels


def command(cell: Cell) -> str:
    """Return the cell's flags as a person types them."""
    return shlex.join(cell.flags)
