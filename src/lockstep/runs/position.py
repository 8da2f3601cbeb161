"""Position of a run, as saved in checkpoints: counters, times, scores."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import counted


@dataclass
class Position:
    """Position of a run. Checkpoints use the same field names."""

    step: int = 0  # completed optimizer steps
    epochs: int = 0  # completed: trained and evaluated
    within: int = 0  # batches of the current pass
    passes: int = 0  # earlier passes over the data of this epoch
    trained: list[int] = field(default_factory=list)  # passes with a step
    is_open: bool = False  # the epoch's batches are over, and code at its end, such as an evaluation, is not
    is_cut: bool = False  # max_steps has ended the run within the epoch, whose end then changed what a resume repeats
    epoch_s: list[float] = field(default_factory=list)
    partial_s: float = 0.0  # training time of the current epoch, at its last save
    best_top1: float = -math.inf
    stale: int = 0  # evaluations since the best one
    scores: dict[str, Any] | None = None  # of the last evaluation; `top1` is the score
    evaluated: int = 0  # the step of the last evaluation

    @classmethod
    def of(cls, meta: dict[str, Any]) -> Position:
        """Return a checkpoint's position."""
        fields = {key: meta[key] for key in _KEYS}
        if fields["scores"] is not None:
            fields["scores"]["top1"] = float(fields["scores"]["top1"])
        fields["best_top1"] = -math.inf if meta["best_top1"] is None else meta["best_top1"]
        return cls(**fields | {"epoch_s": list(meta["epoch_s"]), "trained": list(meta["trained"])})

    def meta(self) -> dict[str, Any]:
        """Return the fields for a checkpoint."""
        return dataclasses.asdict(self) | {"best_top1": None if self.best_top1 == -math.inf else self.best_top1}

    def judge(self, score: float | None, values: dict[str, Any]) -> None:
        """Note an evaluation of this step's weights, and its score, if any, with further `values`. Higher is better."""
        self.evaluated = self.step
        if score is None:
            return
        self.scores = values | {"top1": score}
        is_better = score > self.best_top1
        self.stale = 0 if is_better else self.stale + 1
        self.best_top1 = score if is_better else self.best_top1

    def stalled(self, patience: int | None) -> str:
        """Return why `patience` ends the run at this step, or ""."""
        if patience is None or self.stale < patience or self.evaluated != self.step:
            return ""
        return f"the score has not improved in {counted(self.stale, 'evaluation')} (--patience {patience})"


_KEYS = tuple(field.name for field in dataclasses.fields(Position))
