"""The strategies there are, as far as it concerns how many processes they need: a line each, and no torch.

A launcher has to know that before it starts anything; `strategies/base.py` makes the object once there is a world.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import choose


class Kind(NamedTuple):
    """Where a strategy lives, what it is in a phrase, and what one process of it does."""

    module: str
    type: str
    phrase: str
    has_ranks: bool
    """Whether several processes share the work."""
    drives_all: bool
    """Whether a process drives all devices that are used on its node, or one."""
    options: tuple[str, ...] = ()
    """Flags that it reads and not every strategy does."""

    @property
    def process_per_device(self) -> bool:
        """Whether a node has as many processes as devices."""
        return self.has_ranks and not self.drives_all

    @property
    def has_two_levels(self) -> bool:
        """Whether several processes share the work, and each drives several devices."""
        return self.has_ranks and self.drives_all


_UNUSED = ("find-unused",)
KINDS = {
    "single": Kind(".single", "Single", "one device", False, False),
    "dp": Kind(".data_parallel", "DataParallel", "one process drives several devices (threads on a CPU)", False, True),
    "ddp": Kind(".ddp", "DDP", "one process a device, gradients all-reduced while backward runs", True, False, _UNUSED),
    "hybrid": Kind(
        ".hybrid",
        "Hybrid",
        "one process a node drives several devices (threads on a CPU), gradients all-reduced between processes",
        True,
        True,
        _UNUSED,
    ),
}


def kind(strategy: str) -> Kind:
    """Return the named strategy's line; raise `RequestError` with the nearest names where there is none."""
    return KINDS[choose("strategy", strategy, KINDS)]


def with_ranks() -> str:
    """Return, for a sentence, the strategies under which several processes share the work."""
    return _either(name for name, each in KINDS.items() if each.has_ranks)


def per_device() -> str:
    """Return, for a sentence, the strategies that have a process for each device."""
    return _either(name for name, each in KINDS.items() if each.process_per_device)


def plainer(strategy: str, *, ranks: int, devices: int) -> str:
    """Return the strategy that comes to the same on `ranks` ranks of `devices` devices and has no second level.

    "" where there is none.
    """
    each = KINDS[strategy]
    if not each.has_two_levels or (ranks > 1 and devices > 1):
        return ""
    return next(
        name
        for name, other in KINDS.items()
        if (other.process_per_device if ranks > 1 else other.drives_all and not other.has_ranks)
    )


def with_several() -> str:
    """Return, for a sentence, the strategies that share out work over several devices."""
    return _either(name for name, each in KINDS.items() if each.has_ranks or each.drives_all)


def auto(*, several: bool) -> str:
    """Return the name that `--strategy auto` stands for where there are several devices or ranks, or one."""
    return "ddp" if several else "single"


def _either(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
