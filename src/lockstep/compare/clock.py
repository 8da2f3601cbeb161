"""How long steps last, and the phases in them: by the device's own time, since the host runs ahead of a GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


def moments(on_gpu: bool) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return what tells this moment, and what tells the seconds between two.

    On a GPU a moment is an event of its stream, and it has to be over before seconds are asked for.
    """
    if not on_gpu:
        return time.perf_counter, lambda begin, end: float(end - begin)
    import torch

    def now() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    return now, lambda begin, end: float(begin.elapsed_time(end) / 1000)


class Clock:
    """Seconds of steps, and of the phases in them; what lies between an epoch's end and the next is left out."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._now, self._between = moments(on_gpu)
        self.restart()

    def restart(self) -> None:
        """Forget all, and begin a step now."""
        self._marks: list[tuple[str | None, bool, Any]] = []
        """(the phase that is over, whether the step is, when); no phase where a step begins."""
        self._whole = 0
        self.go_on()

    def go_on(self) -> None:
        """Begin the step now: what was since the last one's end is none of it."""
        del self._marks[self._whole :]
        self._marks.append((None, False, self._now()))

    def note(self, phase: str) -> None:
        """Take note that a phase is over."""
        self._marks.append((phase, False, self._now()))

    def end_step(self, phase: str) -> None:
        """End a step, in this phase, and begin the next one."""
        self._marks.append((phase, True, self._now()))
        self._whole = len(self._marks)

    @property
    def step_s(self) -> list[float]:
        """Of each step that is over."""
        return self._read()[0]

    @property
    def phase_s(self) -> dict[str, float]:
        """Of each phase, in all steps that are over."""
        return self._read()[1]

    def _read(self) -> tuple[list[float], dict[str, float]]:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        steps: list[float] = []
        phases: defaultdict[str, float] = defaultdict(float)
        begun = since = None
        for phase, is_end, at in self._marks[: self._whole]:
            if phase is None:
                begun = at
            else:
                phases[phase] += self._between(since, at)
            if is_end:
                steps.append(self._between(begun, at))
                begun = at
            since = at
        return steps, phases
