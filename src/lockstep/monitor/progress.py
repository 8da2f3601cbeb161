"""A rank's progress: written by its loop, read by its watchdog."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SETUP = "setup"
"""The phase of a rank that prepares (reads data, makes the model), which may take long while others wait."""
EXCHANGES = ("all-reduce", "all-gather", "broadcast", "barrier")
"""The phases of the collectives of a `World`."""


class Progress:
    """A rank's phase, and how many it has entered.

    All ranks enter the same phases in the same order, so the others wait for the one that has entered the fewest.
    Entering one sets two attributes, a tenth of a microsecond, and sends nothing. The host runs ahead of an
    accelerator: an event behind each exchange shows whether the device still waits in it.
    """

    __slots__ = ("count", "event", "failed", "folder", "phase", "step", "traced")

    def __init__(self) -> None:
        self.phase = ""
        """data, forward, backward, all-reduce, step, eval, save, …; "" before the first phase."""
        self.step = 0
        """Optimizer steps made."""
        self.count = 0
        """Phases entered."""
        self.event: Any = None
        """The accelerator's event (`torch.Event`), behind the last block of `during`; None on a CPU."""
        self.folder: Path | None = None
        """The run's folder, once there is one."""
        self.failed: Callable[[str], None] | None = None
        """Records, in that folder, the sentence with which the watchdog ends this rank."""
        self.traced: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
        """Context of each phase of `during` while a profiler traces this rank."""

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.count += 1

    def device_waits(self) -> bool:
        """Return whether the device has not finished the last exchange."""
        with contextlib.suppress(RuntimeError):  # of an event that a CUDA graph has captured
            return self.event is not None and not self.event.query()
        return False

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` within the block; after an error, stay in it."""
        outer = self.phase
        self.enter(phase)
        try:
            if self.traced is None:
                yield
            else:
                with self.traced(phase):
                    yield
        except GeneratorExit:  # the caller has left a loop before its end
            self.enter(outer)
            raise
        self.enter(outer)
        if self.event is not None:
            self.event.record()  # 2 µs, on the stream that waits for the exchange
