"""Strategy interface: how replicas of one model compute and exchange gradients.

A new one is a file beside this one and a line in `config/registry.py`, over which the law tests run. `model` is always
the user's own module; `replica` is the result of `wrap`, and is called in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import registry
from ..config.schema import ParallelConfig
from ..errors import RequestError
from ..world.world import World

_NOTHING = nullcontext()  # stateless, and entered once a micro-batch: worth not making anew


class Strategy:
    """One process, one set of weights. Subclasses override what differs."""

    name: ClassVar[str]
    can_sync_batchnorm: ClassVar[bool]
    """Whether batch statistics can be those of the global micro-batch."""

    def __init__(self, config: ParallelConfig, world: World) -> None:
        self.devices: tuple[torch.device, ...] = (world.device,)
        """The devices that this process computes on, each with a random generator of its own."""

    @property
    def averages_over(self) -> int:
        """The number of ranks over which `backward()` averages. The loss is scaled by it to give a sum."""
        return 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the replica: the module to call in place of `model`. It holds the same parameters."""
        return model

    def prepare(self, model: nn.Module, dry_run: Callable[[], None]) -> None:
        """Prepare the first step (*collective*). `dry_run()` runs one forward and backward pass.

        Gradients, buffers and the global random states are as before when it returns.
        """

    def sync_on(self, replica: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context for one micro-batch, forward pass included. Only the last exchanges gradients."""
        return _NOTHING

    def agree_on_buffers(self, model: nn.Module) -> None:
        """Broadcast rank 0's buffers, so that all evaluate one model (*collective*)."""

    def copies(self, model: nn.Module) -> list[Mapping[str, Tensor]]:
        """Return each further device's copy of the weights. Of this process; named as in a `State`."""
        return []


def build(config: ParallelConfig, world: World) -> Strategy:
    """Return this rank's strategy. Raises `RequestError` for a one-process strategy among several processes."""
    # A launcher has resolved `auto` before there is a world; a library's caller need not.
    name = registry.resolved(config.strategy, several=world.size > 1)
    kind = registry.KINDS[name]
    if world.size > 1 and not kind.has_ranks:
        raise RequestError(
            f"--strategy {name} is one process, and here are {world.size}, each of which would train a model of its "
            f"own; take --strategy {registry.with_ranks()}."
        )
    strategy: Strategy = getattr(import_module(kind.module, __package__), kind.type)(config, world)
    return strategy
