"""Replicas within a process, as in DataParallel: one process that drives several devices.

At each forward pass the model is copied to the devices, the batch is split, the copies run in threads, and their
outputs are gathered; one backward pass sums the gradients into the one set of parameters. BatchNorm sees a replica's
share of the batch alone; replica 0's running statistics stay.

On GPUs this is torch.nn.DataParallel with two differences: a batch is split as `BatchPlan` does among ranks (22, 21, 21
of 64, not 22, 22, 20), and autocast's dtype is passed on: torch passes its threads only whether autocast is on. On a
CPU that class passes its input through, so here threads do the same. They draw from the CPU's one random generator in
arbitrary order: dropout under dp on a CPU, alone among all, is not the same bits twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from .. import _torch
from ..config.registry import per_device
from ..errors import RequestError


def replicate(model: nn.Module, devices: Sequence[torch.device], name: str) -> nn.Module:
    """Return the module that splits its input over `devices`; `model` itself for one device.

    `name` is the method's. Raises `RequestError` for a compiled model.
    """
    if len(devices) == 1:
        return model
    if any(map(_torch.is_compiled, model.modules())):
        raise RequestError(
            f"--compile cannot work under --strategy {name} on {len(devices)} devices, because a copy of a compiled "
            f"module calls the original; leave it out, or use --strategy {per_device()}."
        )
    if devices[0].type == "cuda":
        return _DeviceReplicas(model, tuple(devices))
    return ThreadReplicas(model, len(devices))


def copies(model: nn.Module, devices: Sequence[torch.device]) -> list[Mapping[str, Tensor]]:
    """Return each further GPU's copy of the parameters. Broken peer-to-peer access would damage it."""
    if devices[0].type != "cuda" or len(devices) == 1:
        return []
    named = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    _, *others = comm.broadcast_coalesced(list(named.values()), devices)  # type: ignore[no-untyped-call]
    return [
        {
            name: torch.view_as_complex(copy) if own.is_complex() else copy
            for (name, own), copy in zip(named.items(), others_copies, strict=True)
        }
        for others_copies in others
    ]


class _InAutocast(nn.Module):
    """Computes `module` in the autocast dtype given with its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            return self.module(x)  # type: ignore[no-any-return]


class _DeviceReplicas(nn.DataParallel[_InAutocast]):
    """nn.DataParallel whose replicas compute in the caller's autocast dtype."""

    def __init__(self, module: nn.Module, devices: tuple[torch.device, ...]) -> None:
        super().__init__(_InAutocast(module), device_ids=[device.index for device in devices])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, _autocast_dtype(x))  # type: ignore[no-any-return]

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> tuple[Any, Any]:
        """Return each replica's inputs, (part of x, autocast dtype), on its device."""
        x, dtype = inputs
        sizes = [len(part) for part in _split(x, len(device_ids))]
        parts = comm.scatter(x, device_ids[: len(sizes)], sizes)  # type: ignore[no-untyped-call]
        return [(part, dtype) for part in parts], [kwargs or {} for _ in parts]


class ThreadReplicas(nn.Module):
    """nn.DataParallel for a CPU, in `replicas` threads. Each has its share of the batch and of the cores."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = _InAutocast(module)
        self.replicas = replicas
        self.cores = max(1, torch.get_num_threads() // replicas)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output for `x` (batch first) in parts."""
        dtype, parts = _autocast_dtype(x), _split(x, self.replicas)
        if len(parts) == 1 or not torch.is_grad_enabled():
            return self.module(x, dtype)  # type: ignore[no-any-return]
        # Replica 0 works on the module's own buffers, as in nn.DataParallel: its running statistics are kept.
        replicas = [self.module, *(_torch.replicate(self.module) for _ in parts[1:])]
        outputs: list[Any] = [None] * len(parts)

        def run(number: int) -> None:
            torch.set_num_threads(self.cores)  # of this thread: OpenMP keeps the number for each
            try:
                outputs[number] = replicas[number](parts[number], dtype)
            except BaseException as error:
                outputs[number] = error

        # New threads each time, as in nn.DataParallel: the backward pass takes operations in the order of numbers
        # that a thread counts from its own start. In threads that are kept, one that was once without a part would
        # lag behind, and the gradients of the replicas would be summed in another order ever after.
        threads = [Thread(target=run, args=(at,), name=f"replica-{at}", daemon=True) for at in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for output in outputs:
            if isinstance(output, BaseException):
                raise output
        return torch.cat(outputs)


def _split(x: Tensor, replicas: int) -> list[Tensor]:
    """Return `x` (n, …) in at most `replicas` parts, the larger ones first."""
    return [part for part in x.tensor_split(replicas) if len(part)]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
