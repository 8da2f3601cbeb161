"""Background saving of checkpoints. Reports failed writes as warnings."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import Checkpoints, peek
from ..checkpoint.state import State
from ..files import DEFECTS, shown
from ..monitor.progress import SETUP
from ..world.world import World
from .callbacks import Callbacks
from .folders import unwritable
from .opened import OpenRun


class Saver:
    """Background saver of a run's checkpoints. Rank 0 writes; other ranks only join the collectives."""

    def __init__(self, folder: Path, run: OpenRun, world: World, callbacks: Callbacks) -> None:
        """Open the folder's checkpoints (*collective*)."""
        place = run.config.record.remote or shown(folder)
        self._resume_hint = run.resume_hint or f"continue with the same command and --resume {place}"
        self._run, self._world, self._callbacks = run, world, callbacks
        self._on_disk: int | None = None
        self._checkpoints = world.together(lambda: self._open(folder / "checkpoints") if world.is_main else None)
        self.resumed_at: int | None = world.gather(self._on_disk)[0]
        """Step of this folder's checkpoint that the run continues; None for a new run or another folder's."""

    def _open(self, folder: Path) -> Checkpoints:
        recorder, state = self._run.recorder, self._run.state
        origin = None if state is None else state.origin

        def warn(text: str) -> None:
            recorder.record("warning", text=text)

        def saved(step: int, path: Path) -> None:
            self._on_disk = step
            recorder.record("checkpoint", step=step, path=str(path))
            self._callbacks.call("save", step=step, path=str(path))

        if state is not None and origin is not None and origin.resolve().parent == folder.resolve():
            self._on_disk = state.meta["step"]
        try:
            return Checkpoints(folder, warn=warn, saved=saved, origin=origin, keep=self._run.config.checkpoint.keep)
        except OSError as error:
            raise unwritable(folder, error) from error

    def save(self, make: Callable[[], State], *, step: int, score: float | None) -> None:
        """Save `make()` in the background (*collective*). `score` is None for unscored weights.

        Weights become the folder's best checkpoint if their score exceeds that checkpoint's. The run's best score so
        far may be without a checkpoint, after a failed save or a resume from another folder.
        """
        with self._world.progress.during("save"):
            state = make()
            if self._checkpoints is not None:
                self._checkpoints.wait()  # an earlier save may still replace `best`
                is_best = score is not None and score > self._best_score(self._checkpoints.folder)
                self._checkpoints.save(state, step=step, best=is_best)

    def _best_score(self, folder: Path) -> float:
        """Return the score of this run's `best` checkpoint; -inf if none."""
        with contextlib.suppress(*DEFECTS):  # missing or damaged
            meta = peek(folder / "best") or {}
            if meta["step"] <= (self._on_disk or 0):  # else `best` belongs to an abandoned branch of the run
                return float(meta["scores"]["top1"])
        return -math.inf

    def poll(self) -> None:
        """Report the result of the background save, if it has ended."""
        if self._checkpoints is not None:
            self._checkpoints.poll()

    def finish(self, step: int, *, upload_limit_s: float = math.inf) -> tuple[str, str]:
        """Return (reason why `step` is not saved, advice) (*collective*). The reason is "" if `step` is on the disk.

        Waits for an upload, at most `upload_limit_s`.
        """
        with self._world.progress.during("save"):
            self.close()
        with self._world.progress.during(SETUP):  # it may last: rank 0 waits for uploads, the others for it
            self._run.recorder.flush(upload_limit_s)
        on_disk = self._world.gather(self._on_disk)[0]
        if on_disk == step:
            return "", self._resume_hint
        reason, hint = "there is no checkpoint", "start the same command again"
        if on_disk is not None:
            reason, hint = f"the last one is of step {on_disk}", self._resume_hint
        return reason, f"fix the problems in the warnings and {hint}"

    def close(self) -> None:
        """Wait for the background save."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
