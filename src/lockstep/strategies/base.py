"""What a strategy is: how replicas of one model compute and exchange gradients.

The engine calls these methods and never asks which strategy it has. A new one is a file beside this one and a
line in `kinds.py`; the law tests run over those lines, so its tests come for free.

`model` is always the user's own module; `replica` is what `wrap` returned for it, and what is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


class Strategy(Protocol):
    """How replicas compute and exchange gradients. Methods marked *collective* are called by every rank."""

    name: ClassVar[str]
    can_sync_batchnorm: ClassVar[bool]
    """Whether batch statistics can be those of the global micro-batch."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that this process computes on, each with a random generator of its own."""

    @property
    def averages_over(self) -> int:
        """The number of ranks over which `backward()` averages; the loss is multiplied by it, so that it sums."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the replica: the module to call in place of `model`, which holds the same parameters."""

    def settle(self, model: nn.Module, rehearse: Callable[[], None]) -> None:
        """Make ready for the first step; `rehearse()` runs one forward and backward pass (*collective*).

        Gradients, buffers and the global random states are as before when it returns. A model that counts its forward
        passes in an attribute of its own sees one more under a strategy that rehearses.
        """

    def sync_on(self, replica: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context for one micro-batch, forward pass included: gradients are exchanged in the last only."""

    def agree_on_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers, so that all evaluate the same model (*collective*)."""

    def copies(self, model: nn.Module) -> list[Mapping[str, Tensor]]:
        """Return the weights as the further devices of this process get them, by name: one mapping for each device.

        They are named as in a `State`, and the same bits as the process's own; there are none where the process
        computes with one set of weights.
        """


class Replicated:
    """What strategies have in common whose ranks each hold the whole model."""

    def settle(self, model: nn.Module, rehearse: Callable[[], None]) -> None:
        """Nothing has to be made ready."""

    def sync_on(self, replica: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Nothing is exchanged."""
        return _NOTHING

    def agree_on_buffers(self, model: nn.Module) -> None:
        """One process has one set of buffers."""

    def copies(self, model: nn.Module) -> list[Mapping[str, Tensor]]:
        """One process has one set of weights."""
        return []


_NOTHING = nullcontext()  # stateless, and entered once a micro-batch: worth not making anew
