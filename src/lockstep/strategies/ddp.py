"""DistributedDataParallel: one process a device, gradients averaged by all-reduce while backward still runs.

torch's DDP puts the parameters into buckets and all-reduces a bucket as soon as its last gradient is there. After
the first backward pass it forms the buckets anew, in the order in which gradients came. The sum of three or more
ranks depends in its last bits on an element's place in its bucket, so that a resumed run, whose first pass uses
the first buckets, would differ from one that was never stopped. `settle` therefore rehearses one pass before the
first step: the buckets are then static, and the same in every run.

Through memory that the ranks of a host share, backward waits for each exchange, and no place matters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import _torch
from ..config.schema import ParallelConfig
from ..errors import RequestError
from ..world.random_state import kept
from ..world.world import World
from .base import Replicated

# torch renamed the argument in 2.15 and warns of the old name.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


class _Replica(DistributedDataParallel):
    """torch's DDP, which calls a compiled model as it was written where this rank has no sample.

    The compiler would make another program for no samples, and that of torch 2.11 fails in its backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output for `x` (batch first)."""
        with nullcontext() if len(x) else torch.compiler.set_stance("force_eager"):
            return super().forward(x)  # type: ignore[no-untyped-call, no-any-return]


def _average(world: World, gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients through the memory that the ranks share: what DDP would do by gloo."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(world.sum_(gradients).div_(world.size))
    return done


class DDP(Replicated):
    """torch's DistributedDataParallel over the ranks of `world`."""

    name: ClassVar[str] = "ddp"
    can_sync_batchnorm: ClassVar[bool] = True

    def __init__(self, config: ParallelConfig, world: World) -> None:
        self.world = world
        self.devices: tuple[torch.device, ...] = (world.device,)
        self.find_unused = config.find_unused

    @property
    def averages_over(self) -> int:
        """DDP divides the summed gradients by the world size."""
        return self.world.size

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the DDP module (*collective*: rank 0's parameters and buffers are sent to all)."""
        if self.world.group is None:
            return model  # one rank that no launcher gave a group: there is nobody to exchange with
        with _torch.without_compiler():
            replica = _Replica(
                model,
                device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
                # Synchronised statistics are equal already; local ones follow agree_on_buffers.
                **_KEEP_BUFFERS,
                gradient_as_bucket_view=True,
                find_unused_parameters=self.find_unused,
            )
        if self.world.memory is not None and self.world.device.type == "cpu":
            replica.register_comm_hook(self.world, lambda world, bucket: _average(world, bucket.buffer()))
        return replica

    def settle(self, model: nn.Module, rehearse: Callable[[], None]) -> None:
        """Rehearse one pass, so that DDP's buckets are formed before the first step (*collective*).

        Raises `RequestError` naming the parameters that the loss does not reach, unless find_unused is set.
        """
        if self.world.group is None or self.find_unused:
            return
        buffers = {name: held.clone() for name, held in model.named_buffers()}
        with kept(self.devices):
            rehearse()
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
        """Exchange gradients in the last micro-batch only."""
        if last or not isinstance(replica, DistributedDataParallel):
            return super().sync_on(replica, last=last)
        return replica.no_sync()

    def agree_on_buffers(self, model: nn.Module) -> None:
        """Send rank 0's buffers to all: under local BatchNorm each rank's running statistics are its own."""
        self.world.broadcast(list(model.buffers()))
