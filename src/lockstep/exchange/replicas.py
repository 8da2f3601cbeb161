"""Replicas within a process, as in DataParallel: one process drives several devices.

Each forward pass copies the model to the devices, splits the batch, runs the copies in threads, and gathers their
outputs; one backward pass sums the gradients into the one set of parameters. BatchNorm sees only a replica's part of
the batch; replica 0's running statistics remain.

On GPUs this is torch.nn.DataParallel with two differences: a batch is split as `BatchPlan` does among ranks (22, 21, 21
of 64, not 22, 22, 20), and the threads receive autocast's dtype: torch tells them only whether autocast is on. On a
CPU, torch's class does not split its input; here threads do. They draw from the CPU's one random generator in arbitrary
order: dropout under dp on a CPU is the only case without reproducible bits.
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
    """Return a module that splits its input over `devices`; `model` itself for one device.

    `name` is that of the method. Raises `RequestError` for a compiled model.
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
    """Return each further GPU's copy of the parameters; broken peer-to-peer access would damage a copy."""
    if devices[0].type != "cuda" or len(devices) == 1:
        return []
    parameters = {f"model/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    _, *by_device = comm.broadcast_coalesced(list(parameters.values()), devices)  # type: ignore[no-untyped-call]
    return [
        {
            name: torch.view_as_complex(copy) if parameter.is_complex() else copy
            for (name, parameter), copy in zip(parameters.items(), device_copies, strict=True)
        }
        for device_copies in by_device
    ]


class _InAutocast(nn.Module):
    """Wrapper that computes `module` in the autocast dtype of its second input."""

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
        """Return each replica's inputs on its device: (part of x, autocast dtype)."""
        x, dtype = inputs
        sizes = [len(part) for part in _split(x, len(device_ids))]
        parts = comm.scatter(x, device_ids[: len(sizes)], sizes)  # type: ignore[no-untyped-call]
        return [(part, dtype) for part in parts], [kwargs or {} for _ in parts]


class ThreadReplicas(nn.Module):
    """nn.DataParallel for a CPU: `replicas` threads divide the batch and the cores."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = _InAutocast(module)
        self.replicas = replicas
        self.cores = max(1, torch.get_num_threads() // replicas)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output for `x` (n, …) in parts."""
        dtype, parts = _autocast_dtype(x), _split(x, self.replicas)
        if len(parts) == 1 or not torch.is_grad_enabled():
            return self.module(x, dtype)  # type: ignore[no-any-return]
        # Replica 0 updates the module's buffers, as in nn.DataParallel: its running statistics remain.
        replicas = [self.module, *(_torch.replicate(self.module) for _ in parts[1:])]
        outputs: list[Any] = [None] * len(parts)

        def run(number: int) -> None:
            torch.set_num_threads(self.cores)  # for this thread: OpenMP keeps the number per thread
            try:
                outputs[number] = replicas[number](parts[number], dtype)
            except BaseException as error:
                outputs[number] = error

        # New threads each time, as in nn.DataParallel: the backward pass orders operations by a counter that each
        # thread starts at 0. A reused thread that once had no part would lag behind, and from then on autograd would
        # sum the replicas' gradients in another order.
        threads = [
            Thread(target=run, args=(number,), name=f"replica-{number}", daemon=True) for number in range(len(parts))
        ]
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
