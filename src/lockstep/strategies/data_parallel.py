"""DataParallel: one process that drives several devices.

At each forward pass the model is copied to the devices, the batch is split, the copies run in threads, and their
outputs are gathered; one backward pass runs through all of it and so sums the gradients into the one set of
parameters. It is the oldest way and the simplest to call. Its price is that one Python interpreter feeds every
device, the model is copied anew at each step, and BatchNorm sees a replica's share of the batch alone: replica 0's
running statistics are the ones that stay.

On GPUs this is torch.nn.DataParallel. On a CPU that class passes its input through, so here the same is done with
threads: the same split, threads, gather and single backward pass, over replicas that share the parameters.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import ParallelConfig
from ..world import World
from .base import Replicated


class DataParallel(Replicated):
    """One process that splits each micro-batch over its devices."""

    name: ClassVar[str] = "dp"
    can_sync_batchnorm: ClassVar[bool] = False
    averages_over = 1  # the single backward pass sums over replicas by itself

    def __init__(self, config: ParallelConfig, world: World) -> None:
        indices = config.gpu_indices or range(config.devices or torch.cuda.device_count() or 1)
        if world.device.type == "cuda":
            self.devices = tuple(torch.device("cuda", index) for index in indices)
        else:
            self.devices = (world.device,) * (config.devices or 1)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that splits its input over the devices."""
        if self.devices[0].type == "cuda":
            return nn.DataParallel(model, device_ids=[device.index for device in self.devices])
        return ThreadReplicas(model, len(self.devices))


class ThreadReplicas(nn.Module):
    """nn.DataParallel for a CPU: `replicas` threads, each with its share of the batch and of the processor's cores."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        self.replicas = replicas
        cores = max(1, torch.get_num_threads() // replicas)
        # The number of OpenMP threads belongs to the thread that starts them, hence an initializer for each.
        self._threads = ThreadPoolExecutor(replicas, "replica", torch.set_num_threads, (cores,))

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output for `x` (batch first), computed in parts of the batch."""
        parts = x.chunk(self.replicas) if len(x) else (x,)
        if len(parts) == 1 or not torch.is_grad_enabled():
            return self.module(x)  # type: ignore[no-any-return]
        # Replica 0 works on the module's own buffers, as in nn.DataParallel: its running statistics are kept.
        replicas = [self.module, *(_replicate(self.module) for _ in parts[1:])]
        # Autocast is a thread's own; what holds here must hold in the threads.
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        pending = [
            self._threads.submit(_run, replica, part, dtype) for replica, part in zip(replicas, parts, strict=True)
        ]
        return torch.cat([one.result() for one in pending])


def _run(replica: nn.Module, part: Tensor, dtype: torch.dtype | None) -> Tensor:
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        return replica(part)  # type: ignore[no-any-return]


def _replicate(module: nn.Module) -> nn.Module:
    """Return a copy of the module tree that shares the parameters and has buffers of its own."""
    copies: dict[nn.Module, nn.Module] = {}
    for each in module.modules():
        copy = each.__new__(type(each))
        copy.__dict__ = each.__dict__.copy()
        copy._parameters = each._parameters.copy()
        copy._buffers = {name: None if held is None else held.clone() for name, held in each._buffers.items()}
        copies[each] = copy
    for each, copy in copies.items():
        copy._modules = {name: None if child is None else copies[child] for name, child in each._modules.items()}
    return copies[module]
