"""What a rank is doing at this moment: written by the loop, read by the watch (see `watch`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

SETUP = "setup"
"""The phase of a rank that prepares: reads data, makes the model. It may take its time, and others wait for it."""


class Listener(Protocol):
    """Hears how a job goes on in this rank: what measures one (see `compare`). Nothing is saved meanwhile."""

    exchanges: bool
    """Whether gradients are exchanged, and replicas compared."""
    is_endless: bool
    """Whether the job goes on whatever its epochs."""

    def ended_phase(self, phase: str) -> None:
        """Take note that a phase is over."""

    def ended_step(self, loop: Any) -> None:
        """Take note that a step of the `Loop` is over (*collective*)."""

    def resumed(self) -> None:
        """Take note that steps begin again, after what is none."""


class Pulse:
    """The phase that a rank is in, and how many it has entered.

    Every rank of a world enters the same phases in the same order, so that whoever has entered the fewest is the one
    that the others wait for. Entering one costs a tenth of a microsecond: two attributes are set, nothing is sent.
    """

    __slots__ = ("count", "folder", "listener", "phase", "step")

    def __init__(self) -> None:
        self.phase = ""
        """data, forward, backward, all-reduce, step, eval, save, or what else is said; "" while nobody reports."""
        self.step = 0
        """Optimizer steps made."""
        self.count = 0
        """Phases entered."""
        self.folder: Path | None = None
        """The run's folder, once there is one."""
        self.listener: Listener | None = None

    def enter(self, phase: str) -> None:
        """Note that the rank begins `phase`."""
        if self.listener is not None:
            self.listener.ended_phase(self.phase)
        self.phase = phase
        self.count += 1

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` while the block runs, then again in the one before; after an error, stay in it."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        except GeneratorExit:  # the caller has left a loop before its end
            self.enter(before)
            raise
        self.enter(before)
