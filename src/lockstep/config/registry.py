"""The strategies: a line each with what a launcher has to know before it starts anything. No torch."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import choose


class Kind(NamedTuple):
    """Where a strategy lives, what it is in a phrase, and what one process of it does."""

    module: str
    type: str
    phrase: str
    has_ranks: bool  # several processes share the work
    drives_all: bool  # a process drives all devices that are used on its node, not one
    options: tuple[str, ...] = ()  # flags that it reads and not every strategy does

    @property
    def process_per_device(self) -> bool:
        """Whether a node has as many processes as devices."""
        return self.has_ranks and not self.drives_all

    @property
    def has_two_levels(self) -> bool:
        """Whether several processes share the work, and each drives several devices."""
        return self.has_ranks and self.drives_all


_DP = "one process drives several devices (threads on a CPU)"
_DDP = "one process a device, gradients all-reduced while backward runs"
_HYBRID = "one process a node drives several devices (threads on a CPU), gradients all-reduced between processes"
KINDS = {
    "single": Kind(".single", "Single", "one device", False, False),
    "dp": Kind(".data_parallel", "DataParallel", _DP, False, True),
    "ddp": Kind(".ddp", "DDP", _DDP, True, False, ("find-unused",)),
    "hybrid": Kind(".hybrid", "Hybrid", _HYBRID, True, True, ("find-unused",)),
}


def kind(strategy: str) -> Kind:
    """Return the named strategy's line; raise `RequestError` with the nearest names where there is none."""
    return KINDS[choose("strategy", strategy, KINDS)]


def with_ranks() -> str:
    """Return, for a sentence, the strategies under which several processes share the work."""
    return " or ".join(name for name, each in KINDS.items() if each.has_ranks)


def per_device() -> str:
    """Return, for a sentence, the strategies that have a process for each device."""
    return " or ".join(name for name, each in KINDS.items() if each.process_per_device)


def with_several() -> str:
    """Return, for a sentence, the strategies that share out work over several devices."""
    return " or ".join(name for name, each in KINDS.items() if each.has_ranks or each.drives_all)


def auto(*, several: bool) -> str:
    """Return the strategy that `--strategy auto` stands for with several devices or ranks, or one."""
    return "ddp" if several else "single"
