"""Whether a model can be measured in float64, and which of its operations cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import RunConfig
from ..errors import RequestError
from ..job import Job, assemble
from ..world import World

TOLERANCES = {"fp64": 1e-9}
TOLERANCE = 1e-4
"""Of all other precisions: float32 has 7 digits, of which sums over layers and samples take some."""


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operation that came last, and those that give float32 for what is float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last = ""
        self.coarse: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = func.name()
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.dtype != torch.float64:
                self.coarse[func.name()] = None
        return found


def check(config: RunConfig, world: World, refused: Exception) -> None:
    """Raise `RequestError` where `config`'s model runs in float32 and not in float64, which `refused` came of.

    To be called on every rank that has met `refused`; each finds the same.
    """
    if config.precision.name != "fp64":
        return
    plain = dataclasses.replace(config.precision, name="fp32")
    parallel = dataclasses.replace(config.parallel, strategy="single", devices=None, batchnorm="auto")
    plain_config = dataclasses.replace(config, precision=plain, parallel=parallel)
    try:
        job = assemble(plain_config, World.alone(world.device))
    except (RequestError, RuntimeError):
        return  # then it is not float64 that it cannot
    watch = _Watching()
    try:
        _tried(job.model, _sample(job, torch.float32))
        with watch:
            _tried(job.model.double(), _sample(job, torch.float64))
    except RuntimeError as error:
        if not watch.last:
            return  # it runs in neither
        said = " ".join(str(error).split("\n")[0].split())
        raise RequestError(
            f"--model {config.model.name} cannot run in float64: {watch.last} raised {type(error).__name__}: {said}; "
            f"verify it with --precision fp32, whose tolerance is {TOLERANCE:g}."
        ) from refused
    finally:
        job.data.close()


def coarse(job: Job, x: Tensor) -> list[str]:
    """Return the operations of the model that give less than float64 for x (n, …) in float64."""
    watch = _Watching()
    with watch, torch.no_grad():
        job.model(x)
    return list(watch.coarse)


def _sample(job: Job, dtype: torch.dtype) -> Tensor:
    given = job.data.train.dtype
    dtype = dtype if given.is_floating_point else given
    return torch.zeros((2, *job.data.train.shape), dtype=dtype, device=job.world.device)


def _tried(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
