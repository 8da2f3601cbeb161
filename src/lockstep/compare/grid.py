"""The variants of one job: every combination of the values that options take, or why one cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config.options import leaves
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..errors import RequestError, counted, unknown
from ..launchers import table

MOST = 64
"""Variants that are run without --yes."""
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
    """Return {option: its values} of words such as "devices=1,2"; raise `RequestError` for what is none such."""
    known = {leaf.key for leaf in leaves()}
    found: dict[str, list[str]] = {}
    for word in vary:
        key, _, text = word.partition("=")
        key = key.strip().removeprefix("--").replace("_", "-")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not values:
            raise RequestError(f"--vary {word}: give an option and its values, as in --vary devices=1,2.")
        if key not in known:
            hint = "lockstep train --help lists all; a script's own flags do not vary."
            raise unknown("option of --vary", key, known, hint)
        if key in _DECIDED:
            raise RequestError(f"--vary {key}: the comparison itself decides on that; leave it out.")
        found[key] = list(dict.fromkeys([*found.get(key, []), *values]))
    return found


def cells(
    varied: Mapping[str, Sequence[str]],
    parse: Callable[[Words], RunConfig],
    *,
    is_weak: bool = False,
    is_confirmed: bool = False,
) -> list[Cell]:
    """Return a cell for each combination; `parse` returns the config of these flags over the job's own.

    If `is_weak`, the global batch grows with the devices. Raises `RequestError` for more than `MOST` that are not
    confirmed, and where none can be run.
    """
    combined = list(itertools.product(*varied.values()))
    if len(combined) > MOST and not is_confirmed:
        raise RequestError(f"--vary asks for {len(combined)} variants; vary less, or add --yes where you mean it.")
    found = [_cell(dict(zip(varied, values, strict=True)), parse, is_weak) for values in combined]
    if all(cell.why_not for cell in found):
        raise RequestError(f"None of {counted(len(found), 'variant')} can be run; {found[0].name}: {found[0].why_not}")
    return found


def words(key: str, value: str) -> Words:
    """Return the option as flags."""
    if value == "true":
        return (f"--{key}",)
    return (f"--no-{key}",) if value == "false" else (f"--{key}", value)


def _cell(options: dict[str, str], parse: Callable[[Words], RunConfig], is_weak: bool) -> Cell:
    flags = tuple(word for key, value in options.items() for word in words(key, value))
    name = "-".join(f"{key}-{value}" if value in ("true", "false") else value for key, value in options.items())
    config, why_not = None, ""
    try:
        config = parse(flags)
        asked = config.parallel
        if is_weak and asked.devices is None and asked.strategy != "single":
            raise RequestError("--scaling weak has to know how many devices: give --devices, or --vary devices=1,2.")
        if is_weak and (devices := asked.devices or 1) > 1:
            flags = (*flags, "--batch", str(config.batch.size * devices))
            config = parse(flags)
        why_not = _contradiction(config)
    except RequestError as error:
        why_not = str(error)
    return Cell(name=name, flags=flags, options=options, config=None if why_not else config, why_not=why_not)


def _contradiction(config: RunConfig) -> str:
    """Return why the devices and the strategy do not go together; "" where they do."""
    devices, strategy = config.parallel.devices, config.parallel.strategy
    if (kind := KINDS.get(strategy)) is None:
        return ""  # auto: the job itself finds out which devices there are
    several = kind.has_ranks or kind.drives_all
    if devices is None:
        is_one = kind.process_per_device and table.least_ranks(config) == 1
        return f"{strategy} on one device is what single is; give --devices." if is_one else ""
    if several != (devices > 1):
        found = f"is one device, and {devices} were asked for." if devices > 1 else "on one device is what single is."
        return f"{strategy} {found}"
    return f"{strategy} needs several nodes, which are started by hand." if kind.has_two_levels else ""


def usual(
    cpus: int, gpus: int, *, has_bf16: bool, is_script: bool, given: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Return what is varied by default: the ways to train that make sense on this machine.

    `given` has the job's own flags, by option: of the ways, that one is compared with one device, and a precision that
    was asked for is the only one.
    """
    given = given or {}
    devices = ["1", given.get("devices", str(gpus or min(max(2, cpus), 4)))]
    ways = [name for name, kind in KINDS.items() if name != "single" and not kind.has_two_levels]
    found: dict[str, list[str]] = {}
    if not is_script and devices[1] != "1":  # on one device all are what single is
        found["strategy"] = ["single", *([given["strategy"]] if "strategy" in given else ways)]
    found["devices"] = devices
    if (has_bf16 or gpus) and "precision" not in given:
        found["precision"] = ["fp32", "bf16"]
    found = {key: list(dict.fromkeys(values)) for key, values in found.items()}
    return {key: values for key, values in found.items() if len(values) > 1}
