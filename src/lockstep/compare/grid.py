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

_DECIDED = ("output", "remote", "resume", "eval-every", "quiet")
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
        """Return whether this is `other` on one device, under any strategy."""
        differ = {key for key, _ in self.options.items() ^ other.options.items()}
        if self.config is None or not differ <= {"strategy", "devices"}:
            return False
        return self.config.parallel.devices == 1 or self.config.parallel.strategy == "single"


def axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Return {option: values} of words such as "devices=1,2".

    Raises `RequestError` for unknown options, with the nearest names.
    """
    kinds = {leaf.key: leaf.kind for leaf in leaves()}
    options: dict[str, list[str]] = {}
    for word in vary:
        key, _, text = word.partition("=")
        key = key.strip().removeprefix("--").replace("_", "-")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not values:
            raise RequestError(f"--vary {word}: give an option and its values, as in --vary devices=1,2.")
        if key not in kinds:
            hint = "lockstep train --help lists all; a script's own flags do not vary."
            raise unknown("option of --vary", key, kinds, hint)
        if key in _DECIDED:
            raise RequestError(f"--vary {key}: the comparison itself decides on that; leave it out.")
        if kinds[key] is bool and not {*values} <= _SWITCHES.keys():
            raise RequestError(f"--vary {word}: give true, false or both.")
        options[key] = list(dict.fromkeys([*options.get(key, []), *values]))
    return options


def cells(
    varied: Mapping[str, Sequence[str]],
    parse: Callable[[Words], RunConfig],
    *,
    is_weak: bool = False,
) -> list[Cell]:
    """Return a cell for each combination of values.

    `parse` returns the job's config with more flags. If `is_weak`, the global batch grows with the devices. Raises
    `RequestError` if no variant can be run.
    """
    combinations = itertools.product(*varied.values())
    grid = [_cell(dict(zip(varied, values, strict=True)), parse, is_weak) for values in combinations]
    if all(cell.why_not for cell in grid):
        raise RequestError(f"None of {counted(len(grid), 'variant')} can be run; {grid[0].name}: {grid[0].why_not}")
    return grid


def words(key: str, value: str) -> Words:
    """Return the option as flags."""
    return (_SWITCHES[value].format(key),) if value in _SWITCHES else (f"--{key}", value)


def _cell(options: dict[str, str], parse: Callable[[Words], RunConfig], is_weak: bool) -> Cell:
    flags = tuple(itertools.chain(*itertools.starmap(words, options.items())))
    is_lone = len(options) == 1  # a number alone does not name its option
    name = "-".join(
        f"{key}-{value}" if value in _SWITCHES or (is_lone and _NUMBER.fullmatch(value)) else value
        for key, value in options.items()
    )
    try:
        config = parse(flags)
        parallel = config.parallel
        if is_weak and parallel.devices is None and parallel.strategy != "single":
            raise RequestError("--scaling weak has to know how many devices: give --devices, or --vary devices=1,2.")
        if is_weak and (devices := parallel.devices or 1) > 1:
            flags = (*flags, "--batch", str(config.batch.size * devices))
            config = parse(flags)
        _check_devices(config)
    except RequestError as error:
        return Cell(name=name, flags=flags, options=options, why_not=str(error))
    return Cell(name=name, flags=flags, options=options, config=config)


def _check_devices(config: RunConfig) -> None:
    """Raise `RequestError` if devices and strategy do not fit."""
    devices, strategy = config.parallel.devices, config.parallel.strategy
    if (kind := KINDS.get(strategy)) is None:
        return  # auto: the job finds the devices
    if kind.has_two_levels:
        raise RequestError(f"{strategy} needs several nodes, which are started by hand.")
    if devices is None:
        devices = plan(config).least_ranks if kind.process_per_device else 2 if kind.drives_all else 1
    is_several = kind.has_ranks or kind.drives_all
    if devices == 1 and is_several:
        raise RequestError(f"{strategy} on one device is the same as single; give --devices.")
    if devices > 1 and not is_several:
        raise RequestError(f"{strategy} uses one device, and {devices} were requested.")


def defaults(cpus: int, gpus: int, *, has_bf16: bool, is_script: bool, job: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the options to vary by default on this machine.

    `job` has the values of the job's flags: their strategy and devices are compared with one device; their precision
    is not varied.
    """
    devices = job.get("devices", str(gpus or min(max(2, cpus), 4)))
    strategies = [
        name for name, kind in KINDS.items() if name != "single" and not (kind.has_two_levels or kind.divides_state)
    ]
    strategies = [job["strategy"]] if "strategy" in job else strategies
    axes = {
        "strategy": [] if is_script or devices == "1" else ["single", *strategies],  # on one device, all are single
        "devices": ["1", devices],
        "precision": ["fp32", "bf16"] if (has_bf16 or gpus) and "precision" not in job else [],
    }
    axes = {key: list(dict.fromkeys(values)) for key, values in axes.items()}
    return {key: values for key, values in axes.items() if len(values) > 1}
