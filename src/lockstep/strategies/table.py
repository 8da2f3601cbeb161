"""From a strategy's name to the object; `config/registry.py` says which there are. Imports torch only to build."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ..config import registry
from ..errors import RequestError

if TYPE_CHECKING:
    from ..config.schema import ParallelConfig
    from ..world.world import World
    from .base import Strategy


def build(config: ParallelConfig, world: World) -> Strategy:
    """Return the strategy that `config` names, for this rank; one of one process among several is refused."""
    # A launcher has resolved `auto` before there is a world; a library's caller need not.
    name = registry.auto(several=world.size > 1) if config.strategy == "auto" else config.strategy
    kind = registry.kind(name)
    if world.size > 1 and not kind.has_ranks:
        raise RequestError(
            f"--strategy {name} is one process, and here are {world.size}, each of which would train a model of its "
            f"own; take --strategy {registry.with_ranks()}."
        )
    strategy: Strategy = getattr(import_module(kind.module, __package__), kind.type)(config, world)
    return strategy
