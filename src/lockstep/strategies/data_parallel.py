"""DataParallel: one process that drives several devices.

At each forward pass the model is copied to the devices, the batch is split, the copies run in threads, and their
outputs are gathered; one backward pass runs through all of it and so sums the gradients into the one set of
parameters. It is the oldest way and the simplest to call. Its price is that one Python interpreter feeds every
device, the model is copied anew at each step, and BatchNorm sees a replica's share of the batch alone: replica 0's
running statistics are the ones that stay.

On GPUs this is torch.nn.DataParallel. On a CPU that class passes its input through, so here the same is done with
threads: split, threads, gather and a single backward pass, over replicas that share the parameters. Such
threads draw from the CPU's one random generator, in the order in which they happen to come: dropout under dp on a CPU,
alone among all, is not the same bits twice. GPUs have a generator each.

A batch is split as `BatchPlan` shares it out among ranks, so that each replica has what a rank of ddp would have:
torch.nn.DataParallel by itself gives the last replica what is left (22, 22, 20 of 64, where ranks have 22, 21, 21).

Autocast belongs to a thread, and torch.nn.DataParallel hands its threads only whether it is on, not its dtype: they
would compute in float16 where bfloat16 was asked. `InAutocast` therefore takes the caller's dtype along.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from ..config.registry import per_device
from ..config.schema import ParallelConfig
from ..errors import RequestError
from ..world.world import World
from .base import Replicated


class DataParallel(Replicated):
    """One process that splits each micro-batch over its devices."""

    name: ClassVar[str] = "dp"
    can_sync_batchnorm: ClassVar[bool] = False
    averages_over = 1  # the single backward pass sums over replicas by itself

    def __init__(self, config: ParallelConfig, world: World) -> None:
        self.devices = driven(config, world)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that splits its input over the devices.

        Raises `RequestError` where there are several devices and `model` is compiled.
        """
        return spread(model, self.devices, strategy=self.name)

    def copies(self, model: nn.Module) -> list[Mapping[str, Tensor]]:
        """Return the parameters as each GPU but the first gets them in a forward pass."""
        return copied(model, self.devices)


def driven(config: ParallelConfig, world: World) -> tuple[torch.device, ...]:
    """Return the devices of a process that drives several: its GPUs, the world's device first, or a CPU's threads."""
    if world.device.type != "cuda":
        return (world.device,) * (config.devices or 1)
    indices = config.gpu_indices or range(config.devices or torch.cuda.device_count() or 1)
    return tuple(torch.device("cuda", index) for index in indices)


def spread(model: nn.Module, devices: tuple[torch.device, ...], *, strategy: str) -> nn.Module:
    """Return the module that splits its input over the devices, in parts as even as `BatchPlan`'s.

    Raises `RequestError` where there are several devices and `model` is compiled; `strategy` is who is told.
    """
    if len(devices) > 1 and any(module._compiled_call_impl is not None for module in model.modules()):
        raise RequestError(
            f"--compile cannot work under --strategy {strategy} on {len(devices)} devices, because a copy of a "
            f"compiled module calls the original; leave it out, or use --strategy {per_device()}."
        )
    if devices[0].type == "cuda":
        return DeviceReplicas(model, devices)
    return ThreadReplicas(model, len(devices))


def copied(model: nn.Module, devices: tuple[torch.device, ...]) -> list[Mapping[str, Tensor]]:
    """Return the parameters as each GPU but the first gets them in a forward pass, copied in the same way.

    Where peer-to-peer access between GPUs is broken, these copies are what it ruins. Threads on a CPU share one set of
    weights.
    """
    if devices[0].type != "cuda" or len(devices) == 1:
        return []
    named = {f"model/{name}": held.detach() for name, held in model.named_parameters()}
    _, *others = comm.broadcast_coalesced(list(named.values()), devices)  # type: ignore[no-untyped-call]
    return [
        {
            name: torch.view_as_complex(copy) if own.is_complex() else copy
            for (name, own), copy in zip(named.items(), copies, strict=True)
        }
        for copies in others
    ]


class InAutocast(nn.Module):
    """`module`, computed in the autocast dtype that comes with its input, whatever holds in the calling thread."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return the module's output for `x` under autocast to `dtype`, or without autocast."""
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            return self.module(x)  # type: ignore[no-any-return]


class DeviceReplicas(nn.DataParallel[InAutocast]):
    """nn.DataParallel whose replicas compute in the caller's autocast dtype."""

    def __init__(self, module: nn.Module, devices: tuple[torch.device, ...]) -> None:
        super().__init__(InAutocast(module), device_ids=[device.index for device in devices])

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output for `x` (batch first), computed in parts of the batch."""
        return super().forward(x, _autocast_dtype(x))  # type: ignore[no-any-return]

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> tuple[Any, Any]:
        """Return the inputs of each replica, (part of x, autocast dtype), on its device."""
        x, dtype = inputs
        sizes = [len(part) for part in _split(x, len(device_ids))]
        parts = comm.scatter(x, device_ids[: len(sizes)], sizes)  # type: ignore[no-untyped-call]
        return [(part, dtype) for part in parts], [kwargs or {} for _ in parts]


class ThreadReplicas(nn.Module):
    """nn.DataParallel for a CPU: `replicas` threads, each with its share of the batch and of the processor's cores."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = InAutocast(module)
        self.replicas = replicas
        self.cores = max(1, torch.get_num_threads() // replicas)

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output for `x` (batch first), computed in parts of the batch."""
        dtype = _autocast_dtype(x)
        parts = _split(x, self.replicas)
        if len(parts) == 1 or not torch.is_grad_enabled():
            return self.module(x, dtype)  # type: ignore[no-any-return]
        # Replica 0 works on the module's own buffers, as in nn.DataParallel: its running statistics are kept.
        replicas = [self.module, *(_replicate(self.module) for _ in parts[1:])]
        # New threads each time, as in nn.DataParallel: the backward pass takes operations in the order of numbers
        # that a thread counts from its own start. In threads that are kept, one that was once without a part would
        # lag behind, and the gradients of the replicas would be summed in another order ever after.
        runs = [
            _Run(f"replica-{index}", replica, part, dtype, self.cores)
            for index, (replica, part) in enumerate(zip(replicas, parts, strict=True))
        ]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
        return torch.cat([run.result() for run in runs])


class _Run(Thread):
    """One replica's forward pass, in a thread of its own."""

    def __init__(self, name: str, replica: nn.Module, part: Tensor, dtype: torch.dtype | None, cores: int) -> None:
        super().__init__(name=name, daemon=True)
        self._work = (replica, part, dtype, cores)
        self._output: Tensor | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        replica, part, dtype, cores = self._work
        torch.set_num_threads(cores)  # of this thread: OpenMP keeps the number for each
        try:
            self._output = replica(part, dtype)
        except BaseException as error:  # raised again by the caller
            self._error = error

    def result(self) -> Tensor:
        """Return the output, once joined; raises what the replica raised."""
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


def _split(x: Tensor, replicas: int) -> list[Tensor]:
    """Return the parts of `x` (n, …) for at most so many replicas, the larger ones first; one where n is 0."""
    return [part for part in x.tensor_split(replicas) if len(part)] or [x]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast has in this thread on the device of `x`; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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
