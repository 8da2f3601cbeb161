"""Measure seconds of steps and their phases, by the device's clock."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..monitor.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

_FLOAT64_BYTES = 8


class Clock:
    """Times steps and the marks within them; excludes the time between epochs.

    A mark is the end of a phase or the place of an exchange. The host runs ahead of a GPU, so GPU times come from
    events.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self.nodes: list[Any] = []  # of autograd's graphs, with the hooks of `mark_exchanges`
        self.restart()

    def restart(self) -> None:
        """Drop all steps and begin one now."""
        self._steps: list[list[tuple[Any, Any]]] = []
        self.go_on()

    def go_on(self) -> None:
        """Begin a step now; exclude the time since the last one."""
        self._marks: list[tuple[Any, Any]] = [(None, self._now())]

    def mark(self, label: Any) -> None:
        """Mark the end of `label`."""
        self._marks.append((label, self._now()))

    def end_step(self, label: Any = None) -> None:
        """End `label` and its step; begin the next step."""
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
        totals: defaultdict[Any, float] = defaultdict(float)
        for label, seconds in itertools.chain(*self._read()):
            totals[label] += seconds
        return dict(totals)

    def profile(self) -> dict[str, Any]:
        """Return a step's labels ("points") and the "seconds" between them, of shape (steps, points + 1).

        Excludes steps whose labels differ from the most frequent ones.
        """
        steps = self._read()
        paths = [[label for label, _ in step[:-1]] for step in steps]
        points = max(paths, key=paths.count)
        seconds = [[gap_s for _, gap_s in step] for step, path in zip(steps, paths, strict=True) if path == points]
        return {"points": points, "seconds": seconds}

    def _read(self) -> list[list[tuple[Any, float]]]:
        """Return each step's labels with the seconds since the previous mark."""
        if self._on_gpu:
            import torch

            torch.accelerator.synchronize()
        return [
            [(label, self._seconds(begin, end)) for (_, begin), (label, end) in itertools.pairwise(marks)]
            for marks in self._steps
        ]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        import torch

        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin)


def _forwarded(name: str) -> Any:
    def value(progress: MarkedProgress) -> Any:
        return getattr(progress._progress, name)

    def set_value(progress: MarkedProgress, value: Any) -> None:
        setattr(progress._progress, name, value)

    return property(value, set_value)


class MarkedProgress(Progress):
    """Progress for a rank's watchdog, with a clock that marks the end of each phase."""

    __slots__ = ("_progress", "clock")

    def __init__(self, progress: Progress, clock: Clock | None) -> None:
        """Forward everything to `progress`."""
        self._progress, self.clock = progress, clock

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        if self.clock is not None:
            self.clock.mark(self.phase)
        self._progress.enter(phase)

    phase, step, count = _forwarded("phase"), _forwarded("step"), _forwarded("count")
    folder, failed, event = _forwarded("folder"), _forwarded("failed"), _forwarded("event")
    traced = _forwarded("traced")


def mark_exchanges(
    models: Iterable[nn.Module],
    clock: Clock,
    *,
    on_gpu: bool,
    blocks: Iterable[nn.Module] = (),
    is_last: Callable[[], bool] = lambda: True,
) -> list[RemovableHandle]:
    """Hook the models so that the clock marks each exchange between ranks. Returns the hooks.

    A mark is a `traffic.Point`. Marks where the forward and the backward pass of each of the `blocks` begins, and each
    gradient of a micro-batch that `is_last`.
    """
    import torch
    from torch import nn
    from torch.autograd.graph import get_gradient_edge

    from ..nn.sync_batchnorm import synchronous
    from .traffic import BACKWARD, FORWARD, GATHER, GRADIENT, REDUCE, Point

    def marker(kind: str, size_bytes: int, number: int = -1) -> Any:
        return lambda *_: clock.mark(Point(kind, size_bytes, number))

    def number_bytes(x: Tensor) -> int:  # as nn/cuda_kernels.py and nn/cpu_kernels.py have it
        return torch.promote_types(x.dtype, torch.float32).itemsize if on_gpu else _FLOAT64_BYTES

    def mark_forward(module: Any, inputs: tuple[Tensor]) -> None:
        if module.training:  # mean, variance, count
            marker(GATHER, (2 * module.num_features + 1) * number_bytes(inputs[0]))()

    def mark_backward(module: Any, _: Any, output: Tensor) -> None:
        if module.training and output.requires_grad:
            size_bytes = 2 * module.num_features * number_bytes(output)
            output.register_hook(marker(REDUCE if on_gpu else GATHER, size_bytes))  # type: ignore[no-untyped-call]

    def mark_block(number: int, module: nn.Module) -> list[RemovableHandle]:
        mark, mark_output = marker(FORWARD, 0, number), marker(BACKWARD, 0, number)

        def mark_backward(module: Any, _: Any, output: Any) -> None:
            tensors = (
                output
                if isinstance(output, tuple | list)
                else [*output.values()]
                if isinstance(output, dict)
                else [output]
            )
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(mark_output)  # type: ignore[no-untyped-call]
                    return

        def mark_forward(*_: Any) -> None:
            if torch.is_grad_enabled():
                mark()

        return [module.register_forward_pre_hook(mark_forward), module.register_forward_hook(mark_backward)]

    def mark_gradient(number: int, parameter: nn.Parameter) -> RemovableHandle:
        # Not a hook of the parameter: an exchange holds those back until the whole batch has gradients.
        mark, node = marker(GRADIENT, parameter.nbytes, number), get_gradient_edge(parameter).node
        clock.nodes.append(node)  # if nothing keeps it, the next backward pass makes another one
        return node.register_hook(lambda *_: mark() if is_last() else None)

    hooks = [hook for number, module in enumerate(blocks) for hook in mark_block(number, module)]
    joint = nn.ModuleList(models)  # a parameter that models share counts once
    for module in joint.modules():
        if synchronous(module) is not None:
            hooks += [module.register_forward_pre_hook(mark_forward), module.register_forward_hook(mark_backward)]
    numbered = enumerate(joint.parameters())
    return hooks + [mark_gradient(number, parameter) for number, parameter in numbered if parameter.requires_grad]
