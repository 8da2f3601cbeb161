"""DistributedDataParallel: one process per device. All-reduce averages gradients while backward still runs.

torch's DDP all-reduces buckets of parameters, which it forms anew after the first backward pass. The sum of three or
more ranks depends in its last bits on an element's place in its bucket, so that a resumed run would differ from one
that was never stopped. `prepare` therefore dry-runs one pass before the first step: the buckets are then static.
Through memory that the ranks of a host share, backward waits for each exchange, and no place matters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch
from ..config.schema import ParallelConfig
from ..errors import RequestError
from ..world.random_state import kept
from ..world.world import World
from .base import Strategy

# torch renamed the argument in 2.15 and warns of the old name.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


def _average(world: World, gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Average a gradient bucket through the ranks' shared memory. In place of gloo's all-reduce."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(world.sum_(gradients).div_(world.size))
    return done


class DDP(Strategy):
    """torch's DistributedDataParallel over the ranks of `world`."""

    name = "ddp"
    can_sync_batchnorm = True

    def __init__(self, config: ParallelConfig, world: World) -> None:
        super().__init__(config, world)
        self._world, self._find_unused = world, config.find_unused

    @property
    def averages_over(self) -> int:
        return self._world.size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the DDP module (*collective*). All get rank 0's parameters and buffers."""
        world = self._world
        if world.group is None:
            return model  # one rank without a group from a launcher: it exchanges nothing
        with _torch.without_compiler():
            replica = DistributedDataParallel(
                model,
                device_ids=[world.device.index] if world.device.type == "cuda" else None,
                # Synchronised statistics are equal already; local ones follow agree_on_buffers.
                **_KEEP_BUFFERS,
                gradient_as_bucket_view=True,
                find_unused_parameters=self._find_unused,
            )
        if world.memory is not None and world.device.type == "cpu":
            replica.register_comm_hook(world, lambda world, bucket: _average(world, bucket.buffer()))
        return replica

    def prepare(self, model: nn.Module, dry_run: Callable[[], None]) -> None:
        """Rehearse one pass. Refuses parameters that the loss does not reach, unless find_unused is set."""
        if self._world.group is None or self._find_unused:
            return
        buffers = {name: held.clone() for name, held in model.named_buffers()}
        with kept(self.devices):
            dry_run()
        unused = [name for name, item in model.named_parameters() if item.requires_grad and item.grad is None]
        if unused:
            raise RequestError(
                f"The loss does not reach the parameters {', '.join(unused)}, so that ranks would wait for their "
                "gradients for ever: freeze them (requires_grad = False), use them, or pass --find-unused."
            )
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, held in model.named_buffers():
                held.copy_(buffers[name])

    def sync_on(self, replica: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(replica, DistributedDataParallel):
            return super().sync_on(replica, last=last)
        return replica.no_sync()

    def agree_on_buffers(self, model: nn.Module) -> None:
        self._world.broadcast(list(model.buffers()))
