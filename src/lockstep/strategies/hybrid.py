"""DataParallel within a process, DistributedDataParallel between processes: two levels.

A process, usually one a node, drives several devices: each forward pass splits its share of the micro-batch over them,
and one backward pass sums their gradients (see `data_parallel`). torch's DDP then all-reduces what each process has
(see `ddp`). To DDP the replicas are one module whose parameters lie on the first device: each gets its gradient once a
backward pass, summed over the process's devices, and the ranks' average times their number is the sum over all.

A global micro-batch is cut into a part for each device of the world, so that a device has what a rank of ddp would
have there (see `BatchPlan`), and computes batch statistics over that: they cannot be synchronised across the replicas
of one process. Running statistics are those of rank 0's first device.

One rank is dp, and one device a rank is ddp with local batch statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from ..config.schema import ParallelConfig
from ..world.world import World
from .data_parallel import copied, driven, spread
from .ddp import DDP


class Hybrid(DDP):
    """DDP over the ranks of `world`, each of which splits its share over several devices."""

    name: ClassVar[str] = "hybrid"
    can_sync_batchnorm: ClassVar[bool] = False

    def __init__(self, config: ParallelConfig, world: World) -> None:
        super().__init__(config, world)
        self.devices = driven(config, world)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the DDP module over this rank's replicas (*collective*: rank 0's parameters are sent to all).

        Raises `RequestError` where a rank has several devices and `model` is compiled.
        """
        return super().wrap(spread(model, self.devices, strategy=self.name))

    def copies(self, model: nn.Module) -> list[Mapping[str, Tensor]]:
        """Return the parameters as each GPU of this rank but the first gets them in a forward pass."""
        return copied(model, self.devices)
