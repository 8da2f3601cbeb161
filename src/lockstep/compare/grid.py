"""The variants of one job: all combinations of the varied options."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config.options import leaves
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..errors import RequestError, counted, unknown
from ..launchers.plan import plan

_DECIDED = ("output", "resume", "eval-every", "quiet")
_SWITCHES = {"true": "--{}", "false": "--no-{}"}
_NUMBER = re.compile(r"[\d.e+-]+")
Words = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant: its options, flags and config, or why it has none."""

    name: str
    flags: Words
    options: Mapping[str, str] = field(default_factory=dict)
    config: RunConfig | None = None
    why_not: str = ""

    def is_alone_of(self, other: Cell) -> bool:
        """Return whether this is `other` on one device. The strategy may differ."""
        mine, theirs = (each.options.items() for each in (self, other))
        differ = {key for key, _ in mine ^ theirs}
        if self.config is None or not differ <= {"strategy", "devices"}:
            return False
        return self.config.parallel.devices == 1 or self.config.parallel.strategy == "single"


def axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Return {option: values} of words such as "devices=1,2".

    Raises `RequestError` for unknown options, with the nearest names.
    """
    known = {leaf.key: leaf.kind for leaf in leaves()}
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
        if known[key] is bool and not {*values} <= _SWITCHES.keys():
            raise RequestError(f"--vary {word}: give true, false or both.")
        found[key] = list(dict.fromkeys([*found.get(key, []), *values]))
    return found


def cells(
    varied: Mapping[str, Sequence[str]],
    parse: Callable[[Words], RunConfig],
    *,
    is_weak: bool = False,
) -> list[Cell]:
    """Return a cell for each combination of values.

    `parse` returns the config of more flags over the job's own. If `is_weak`, the global batch grows with the devices.
    Raises `RequestError` where none can be run.
    """
    combined = itertools.product(*varied.values())
    found = [_cell(dict(zip(varied, values, strict=True)), parse, is_weak) for values in combined]
    if all(cell.why_not for cell in found):
        raise RequestError(f"None of {counted(len(found), 'variant')} can be run; {found[0].name}: {found[0].why_not}")
    return found


def words(key: str, value: str) -> Words:
    """Return the option as flags."""
    return (_SWITCHES[value].format(key),) if value in _SWITCHES else (f"--{key}", value)


def _cell(options: dict[str, str], parse: Callable[[Words], RunConfig], is_weak: bool) -> Cell:
    flags = tuple(itertools.chain(*itertools.starmap(words, options.items())))
    lone = len(options) == 1  # a number alone does not name its option
    name = "-".join(
        f"{key}-{value}" if value in _SWITCHES or (lone and _NUMBER.fullmatch(value)) else value
        for key, value in options.items()
    )
    try:
        config = parse(flags)
        asked = config.parallel
        if is_weak and asked.devices is None and asked.strategy != "single":
            raise RequestError("--scaling weak has to know how many devices: give --devices, or --vary devices=1,2.")
        if is_weak and (devices := asked.devices or 1) > 1:
            flags = (*flags, "--batch", str(config.batch.size * devices))
            config = parse(flags)
        _check_devices(config)
    except RequestError as error:
        return Cell(name=name, flags=flags, options=options, why_not=str(error))
    return Cell(name=name, flags=flags, options=options, config=config)


def _check_devices(config: RunConfig) -> None:
    """Raise `RequestError` where devices and strategy do not fit."""
    devices, strategy = config.parallel.devices, config.parallel.strategy
    if (kind := KINDS.get(strategy)) is None:
        return  # auto: the job itself finds out which devices there are
    if kind.has_two_levels:
        raise RequestError(f"{strategy} needs several nodes, which are started by hand.")
    if devices is None:
        devices = plan(config).least_ranks if kind.process_per_device else 2 if kind.drives_all else 1
    is_several = kind.has_ranks or kind.drives_all
    if devices == 1 and is_several:
        raise RequestError(f"{strategy} on one device is what single is; give --devices.")
    if devices > 1 and not is_several:
        raise RequestError(f"{strategy} is one device, and {devices} were asked for.")


def usual(cpus: int, gpus: int, *, has_bf16: bool, is_script: bool, given: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the options to vary by default on this machine.

    `given` has the job's own flags, by option: that strategy and these devices are compared with one device, and a
    precision that was asked for is the only one.
    """
    devices = given.get("devices", str(gpus or min(max(2, cpus), 4)))
    ways = [name for name, kind in KINDS.items() if name != "single" and not kind.has_two_levels]
    ways = [given["strategy"]] if "strategy" in given else ways
    found = {
        "strategy": [] if is_script or devices == "1" else ["single", *ways],  # on one device all are what single is
        "devices": ["1", devices],
        "precision": ["fp32", "bf16"] if (has_bf16 or gpus) and "precision" not in given else [],
    }
    found = {key: list(dict.fromkeys(values)) for key, values in found.items()}
    return {key: values for key, values in found.items() if len(values) > 1}
