"""One device. What every other strategy has to equal."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from ..config.schema import ParallelConfig
from ..world.world import World
from .base import Replicated


class Single(Replicated):
    """One process, one device, the model as it is."""

    name: ClassVar[str] = "single"
    can_sync_batchnorm: ClassVar[bool] = True
    averages_over = 1

    def __init__(self, config: ParallelConfig, world: World) -> None:
        """Nothing of the config matters to one device."""
        self.devices = (world.device,)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model
