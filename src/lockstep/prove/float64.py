"""Whether a model can be measured in float64, and which of its operations cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import RunConfig
from ..errors import RequestError
from ..job import Job, assemble
from ..world import World
from .gradients import Step

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


def check(config: RunConfig, world: World, refused: Exception, step: Step | None = None) -> None:
    """Raise `RequestError` where `config`'s model runs in float32 and not in float64, which `refused` came of.

    `step` is a training step of the user's own. To be called on every rank that has met `refused`; each finds the same.
    """
    if config.precision.name != "fp64":
        return
    plain = dataclasses.replace(config.precision, name="fp32")
    parallel = dataclasses.replace(config.parallel, strategy="single", devices=None, batchnorm="auto")
    try:
        job = assemble(dataclasses.replace(config, precision=plain, parallel=parallel), World.alone(world.device))
    except Exception:  # whatever the user's code raises: then it is not float64 that it cannot
        return
    watch = _Watching()
    try:
        _try(job, torch.float32, step)
        with watch:
            _try(job, torch.float64, step)
    except Exception as error:
        if not watch.last:
            return  # it runs in neither
        said = " ".join(str(error).split("\n")[0].split())
        loss = " with its loss" if ":" in config.optim.loss else ""
        whose = f"--model {config.model.name}{loss if step is None else ' with its --step'}"
        raise RequestError(
            f"{whose} cannot run in float64: at {watch.last}, {type(error).__name__} was raised: {said}; verify it "
            f"with --precision fp32, whose tolerance is {TOLERANCE:g}."
        ) from refused
    finally:
        job.data.close()


def coarse(job: Job, x: Tensor) -> list[str]:
    """Return the operations of the model that give less than float64 for x (n, …) in float64."""
    watch = _Watching()
    with watch, torch.no_grad():
        job.model(x)
    return list(watch.coarse)


def _try(job: Job, dtype: torch.dtype, step: Step | None) -> None:
    """Run the model forward and backward on two samples in `dtype`, with its loss, or `step` in place of that."""
    model, train, device = job.model.to(dtype), job.data.train, job.world.device
    x = torch.zeros((2, *train.shape), dtype=dtype if train.dtype.is_floating_point else train.dtype, device=device)
    y = torch.zeros(2, dtype=torch.int64, device=device)
    if step is not None:
        step(model, x, y)
        return
    loss: Tensor = job.loss_fn(model(x), y, reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
