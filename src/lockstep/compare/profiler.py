"""Where a step's computation meets what ranks would exchange, seen on one rank by hooks on modules and parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.sync_batchnorm import SyncBatchNorm
from .clock import moments
from .timeline import GATHER, GRADIENT, REDUCE

_FLOAT64_BYTES = 8
"""Of a number that SyncBatchNorm exchanges."""


class Stamps:
    """A clock of steps: when each reached which of its points, on the device's own time.

    A point is (kind, bytes that a rank gives to the exchange, a number that tells parameters apart).
    """

    def __init__(self, models: Iterable[nn.Module], device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._time, self._between = moments(self._on_gpu)
        self._steps: list[list[tuple[Any, Any]]] = []
        self._hooks: list[Any] = []
        held = nn.ModuleList(models)  # so that what models share is seen once
        for module in held.modules():
            if isinstance(module, SyncBatchNorm):
                self._hooks.append(module.register_forward_pre_hook(self._before_norm))
                self._hooks.append(module.register_forward_hook(self._after_norm))
        for number, each in enumerate(held.parameters()):
            if each.requires_grad:
                point = (GRADIENT, each.nbytes, number)
                self._hooks.append(each.register_post_accumulate_grad_hook(self._marking(point)))  # type: ignore[no-untyped-call]
        self.restart()

    def restart(self) -> None:
        """Begin a step now, and forget the one under way."""
        self._now: list[tuple[Any, Any]] = [(None, self._time())]

    go_on = restart

    def note(self, phase: str) -> None:
        """Take no note of phases."""

    def end_step(self, _: str = "") -> None:
        """End a step, and begin the next one."""
        self._now.append((None, self._time()))
        self._steps.append(self._now)
        self._now = self._now[-1:]

    def told(self) -> dict[str, Any]:
        """Return the points, and {"seconds": (steps, points + 1)} before each and after the last; take the hooks away.

        A step that came to other points than most did is left out.
        """
        for hook in self._hooks:
            hook.remove()
        if self._on_gpu:
            torch.cuda.synchronize()
        paths = [[point for point, _ in step[1:-1]] for step in self._steps]
        points = max(paths, key=paths.count)
        seconds = [
            [self._between(a, b) for (_, a), (_, b) in itertools.pairwise(step)]
            for step, path in zip(self._steps, paths, strict=True)
            if path == points
        ]
        return {"points": points, "seconds": seconds}

    def _before_norm(self, module: SyncBatchNorm, _: Any) -> None:
        if module.training:  # mean, variance, count
            self._mark((GATHER, (2 * module.num_features + 1) * _FLOAT64_BYTES, -1))

    def _after_norm(self, module: SyncBatchNorm, _: Any, output: Tensor) -> None:
        if module.training and output.requires_grad:
            kind = REDUCE if self._on_gpu else GATHER  # as nn/cuda_kernels.py and nn/cpu_kernels.py have it
            point = (kind, 2 * module.num_features * _FLOAT64_BYTES, -1)
            output.register_hook(self._marking(point))  # type: ignore[no-untyped-call]

    def _marking(self, point: Any) -> Any:
        def mark(_: Tensor) -> None:
            self._mark(point)

        return mark

    def _mark(self, point: Any) -> None:
        self._now.append((point, self._time()))
