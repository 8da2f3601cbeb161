"""How far a run has come: all of a checkpoint that is not tensors, random states or the user's."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.state import State
from ..errors import counted
from ..record.result import Scores

_NONE = -1.0
"""In a checkpoint, the best score of a run that has none."""


@dataclass
class Progress:
    """How far a run has come; the names are those in a checkpoint."""

    step: int = 0
    """Optimizer steps made: global batches."""
    epochs: int = 0
    """Whole epochs trained and evaluated."""
    within: int = 0
    """Steps made in the epoch under way."""
    epoch_s: list[float] = field(default_factory=list)
    partial_s: float = 0.0
    """Seconds of training in the epoch under way, when it was saved."""
    best_top1: float = -math.inf
    stale: int = 0
    """Evaluations since the best one."""
    scores: Scores | None = None
    """Of the last evaluation, which was at step `evaluated`."""
    evaluated: int = 0
    planned_epochs: int | None = None
    """Epochs that the run was to have when it was saved; None where it begins."""
    accumulation: int | None = None
    """Global micro-batches that a batch had when it was saved; None where it begins."""
    origin: Path | None = None
    """The checkpoint that it was taken up from."""
    caution: str = ""
    """What is to be said of that checkpoint."""

    @classmethod
    def of(cls, state: State, steps_per_epoch: int | None) -> Progress:
        """Return the progress that a checkpoint holds; older ones do not say what they have made within the epoch."""
        meta = state.meta
        scores = meta["scores"]
        return cls(
            step=meta["step"],
            epochs=meta["epochs"],
            within=meta.get("within", meta["step"] - meta["epochs"] * (steps_per_epoch or 0)),
            epoch_s=list(meta["epoch_s"]),
            partial_s=meta["partial_s"],
            best_top1=-math.inf if meta["best_top1"] == _NONE else meta["best_top1"],
            stale=meta.get("stale", 0),
            scores=None if scores is None or "samples" not in scores else Scores(**scores),
            evaluated=meta["evaluated"],
            planned_epochs=meta["planned_epochs"],
            accumulation=meta["accumulation"],
            origin=state.origin,
            caution=state.caution,
        )

    def meta(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, but for what was planned."""
        return {
            "step": self.step,
            "epochs": self.epochs,
            "within": self.within,
            "epoch_s": list(self.epoch_s),
            "partial_s": self.partial_s,
            "best_top1": _NONE if self.best_top1 == -math.inf else self.best_top1,
            "stale": self.stale,
            "scores": None if self.scores is None else dataclasses.asdict(self.scores),
            "evaluated": self.evaluated,
        }

    def take(self, scores: Scores) -> None:
        """Take the scores of an evaluation at this step."""
        self.judge(scores.top1)
        self.scores = scores

    def judge(self, score: float) -> None:
        """Take the score of the weights at this step, by which the best are chosen: more is better."""
        is_better = score > self.best_top1
        self.stale = 0 if is_better else self.stale + 1
        self.best_top1 = score if is_better else self.best_top1
        self.evaluated = self.step

    def stalled(self, patience: int | None) -> str:
        """Return in a clause that the evaluation at this step was the last that `patience` allows; "" if it was not."""
        if patience is None or self.stale < patience or self.evaluated != self.step:
            return ""
        return f"the score has not improved in {counted(self.stale, 'evaluation')} (--patience {patience})"
