"""Measure seconds of steps and their phases, by the device's clock."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..monitor.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

_FLOAT64_BYTES = 8  # of a number that SyncBatchNorm exchanges


class Clock:
    """Times steps and their marks, without the time between epochs.

    Marks are ends of phases, or points that an exchange needs. The host runs ahead of a GPU: that has its own events.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self.restart()

    def restart(self) -> None:
        """Drop all steps, and begin one now."""
        self._steps: list[list[tuple[Any, Any]]] = []
        self.go_on()

    def go_on(self) -> None:
        """Begin a step now; drop the time since the last one."""
        self._marks: list[tuple[Any, Any]] = [(None, self._now())]

    def mark(self, label: Any) -> None:
        """Mark the end of `label`."""
        self._marks.append((label, self._now()))

    def end_step(self, label: Any = None) -> None:
        """End a step, and `label` in it; begin the next step."""
        self.mark(label)
        self._steps.append(self._marks)
        self._marks = self._marks[-1:]

    @property
    def step_s(self) -> list[float]:
        """Seconds of each completed step."""
        return [sum(seconds for _, seconds in step) for step in self._read()]

    @property
    def phase_s(self) -> dict[Any, float]:
        """Seconds of each label in all completed steps."""
        found: defaultdict[Any, float] = defaultdict(float)
        for label, seconds in itertools.chain(*self._read()):
            found[label] += seconds
        return {**found}

    def profile(self) -> dict[str, Any]:
        """Return a step's labels ("points") and the "seconds" between them. Shape (steps, points + 1).

        Steps with other labels than most are left out.
        """
        steps = self._read()
        paths = [[label for label, _ in step[:-1]] for step in steps]
        points = max(paths, key=paths.count)
        seconds = [[each for _, each in step] for step, path in zip(steps, paths, strict=True) if path == points]
        return {"points": points, "seconds": seconds}

    def _read(self) -> list[list[tuple[Any, float]]]:
        """Return the labels of each step, and the seconds up to each."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return [
            [(label, self._seconds(begin, end)) for (_, begin), (label, end) in itertools.pairwise(marks)]
            for marks in self._steps
        ]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin)


def _passed_on(name: str) -> Any:
    def value(progress: MarkedProgress) -> Any:
        return getattr(progress._progress, name)

    def set_value(progress: MarkedProgress, value: Any) -> None:
        setattr(progress._progress, name, value)

    return property(value, set_value)


class MarkedProgress(Progress):
    """The progress that a rank's watchdog reads; a clock marks the end of each phase."""

    __slots__ = ("_progress", "clock")

    def __init__(self, progress: Progress, clock: Clock | None) -> None:
        """Pass everything on to `progress`."""
        self._progress, self.clock = progress, clock

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        if self.clock is not None:
            self.clock.mark(self.phase)
        self._progress.enter(phase)

    phase, step, count = _passed_on("phase"), _passed_on("step"), _passed_on("count")
    folder, failed = _passed_on("folder"), _passed_on("failed")


def mark_exchanges(models: Iterable[nn.Module], clock: Clock, *, on_gpu: bool) -> list[RemovableHandle]:
    """Have the clock mark a step's exchanges between ranks. Returns the hooks.

    A mark is (kind, bytes that a rank gives to the exchange, the parameter's number).
    """
    from torch import nn

    from ..nn.sync_batchnorm import synchronous
    from .timeline import GATHER, GRADIENT, REDUCE

    def marking(kind: str, size_bytes: int, number: int = -1) -> Any:
        return lambda *_: clock.mark((kind, size_bytes, number))

    def before_norm(module: Any, _: Any) -> None:
        if module.training:  # mean, variance, count
            marking(GATHER, (2 * module.num_features + 1) * _FLOAT64_BYTES)()

    def after_norm(module: Any, _: Any, output: Tensor) -> None:
        if module.training and output.requires_grad:
            kind = REDUCE if on_gpu else GATHER  # as nn/cuda_kernels.py and nn/cpu_kernels.py have it
            output.register_hook(marking(kind, 2 * module.num_features * _FLOAT64_BYTES))  # type: ignore[no-untyped-call]

    hooks: list[RemovableHandle] = []
    together = nn.ModuleList(models)  # a parameter that models share counts once
    for module in together.modules():
        if synchronous(module) is not None:
            hooks += [module.register_forward_pre_hook(before_norm), module.register_forward_hook(after_norm)]
    for number, parameter in enumerate(together.parameters()):
        if parameter.requires_grad:
            mark = marking(GRADIENT, parameter.nbytes, number)
            hooks.append(parameter.register_post_accumulate_grad_hook(mark))  # type: ignore[no-untyped-call]
    return hooks
