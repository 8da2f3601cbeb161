"""The strategies there are: a file each, and a line each here. Listing them imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..config import ParallelConfig
    from ..world import World
    from .base import Strategy


class Entry(NamedTuple):
    """Where a strategy lives, and what it is in a phrase."""

    module: str
    type: str
    phrase: str


TABLE = {
    "single": Entry("single", "Single", "one device"),
    "dp": Entry("data_parallel", "DataParallel", "one process drives several devices (threads on a CPU)"),
    "ddp": Entry("ddp", "DDP", "one process a device, gradients all-reduced while backward runs"),
}


def build(config: ParallelConfig, world: World) -> Strategy:
    """Return the strategy that `config` names, for this rank of `world`."""
    name = config.strategy
    if name == "auto":  # for a library's caller; a launcher has resolved it before there is a world
        name = "ddp" if world.size > 1 else "single"
    entry = TABLE[name]
    strategy: Strategy = getattr(import_module(f".{entry.module}", __package__), entry.type)(config, world)
    return strategy
