"""Saving a run while it goes on: in the background, with what is said where a checkpoint could not be written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import Checkpoints, find, peek
from ..checkpoint.state import State
from ..files import shown, understanding
from ..record.base import Recorder
from ..runs.folders import unwritable
from ..world.world import World

_MEND = "mend what the warnings tell of"


class Saver:
    """Saves the run's state in one format; on ranks other than 0 it takes part in the collectives alone."""

    def __init__(
        self, folder: Path | None, world: World, recorder: Recorder, *, taken_up: State | None = None, again: str = ""
    ) -> None:
        """`folder` is the run's, None to save nothing; warnings and what was saved go to the recorder.

        `taken_up` is the checkpoint that the run goes on from, None where it begins; `again` says how a run that was
        stopped can be continued, where that is not by a flag.
        """
        self._taken_up_at: int | None = taken_up.meta["step"] if taken_up else None
        self._origin = taken_up.origin if taken_up else None
        self._folder = folder
        self._again = again or f"continue with the same command and --resume {shown(folder)}"
        self._world = world
        self._recorder = recorder
        self._on_disk: int | None = None
        self._best_top1 = -math.inf
        """Of the checkpoint that `best` points to. A save may fail: the run's own best is no measure for it."""
        self._next_best_top1 = -math.inf
        self._checkpoints: Checkpoints | None = None
        if folder is not None:
            self._checkpoints = world.together(lambda: self._open(folder) if world.is_main else None)

    def _open(self, folder: Path) -> Checkpoints:
        try:
            checkpoints = Checkpoints(folder / "checkpoints", warn=self._warn, saved=self._saved, origin=self._origin)
        except OSError as error:
            raise unwritable(folder / "checkpoints", error) from error
        with understanding(checkpoints.folder):
            if self._taken_up_at is not None and (last := find(checkpoints.folder)) and (meta := peek(last)):
                self._on_disk = min(meta["step"], self._taken_up_at)
            best = peek(checkpoints.folder / "best")
            if best is not None and best["scores"] is not None and best["step"] <= (self._taken_up_at or 0):
                self._best_top1 = float(best["scores"]["top1"])
        return checkpoints

    def _warn(self, text: str) -> None:
        self._recorder.record("warning", text=text)

    def _saved(self, step: int, path: Path) -> None:
        self._on_disk = step
        self._best_top1 = self._next_best_top1
        self._recorder.record("checkpoint", step=step, path=str(path))

    def save(self, make: Callable[[], State], *, step: int, top1: float = -math.inf) -> None:
        """Save in the background what `make` returns (*collective*); `top1` of weights just evaluated may be best."""
        if self._folder is None:
            return
        with self._world.pulse.during("save"):
            state = make()
            if self._checkpoints is not None:
                self._checkpoints.wait()  # only then it is known what `best` points to
                best = top1 > self._best_top1
                self._next_best_top1 = max(top1, self._best_top1)
                self._checkpoints.save(state, step=step, best=best)

    def poll(self) -> None:
        """Tell how the save in the background ended, if it has."""
        if self._checkpoints is not None:
            self._checkpoints.poll()

    def finish(self, step: int) -> str:
        """Wait until what was saved is on the disk; return, on every rank, a clause that says so (*collective*)."""
        self._wait()
        on_disk = self._world.gather(self._on_disk)[0]
        if self._folder is None:
            return "; nothing was saved, since no output folder was given."
        again = self._again
        if on_disk == step:
            return f" and saved; {again}."
        last = "none before it was" if on_disk is None else f"the last one is of step {on_disk}: {_MEND} and {again}"
        return f", but its checkpoint could not be written; {last}."

    def conclude(self, make: Callable[[], State], *, step: int, top1: float = -math.inf) -> str:
        """Wait until the last save is on the disk; return, on every rank, a sentence where it is not (*collective*).

        A run that was complete when it was taken up is saved, as `save` does, only where it goes on in a folder of its
        own.
        """
        there = self._checkpoints is not None and find(self._checkpoints.folder) is not None
        nothing_done = step == self._taken_up_at
        if nothing_done and not self._world.gather(there)[0]:
            self.save(make, step=step, top1=top1)
        self._wait()
        is_there = self._checkpoints is None or self._on_disk == step or (nothing_done and there)
        told: str = self._world.gather("" if is_there else self._unsaved(step))[0]
        return told

    def _unsaved(self, step: int) -> str:
        newest, again = "there is no checkpoint", "start the same command again"
        if self._on_disk is not None:
            newest = f"the last one is of step {self._on_disk}"
            again = self._again
        return f"The weights of the last step, {step}, are not on the disk: {newest}; {_MEND} and {again}."

    def _wait(self) -> None:
        with self._world.pulse.during("save"):  # on every rank, since all enter the same phases
            if self._checkpoints is not None:
                self._checkpoints.wait()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._checkpoints is not None:
            self._checkpoints.close()
