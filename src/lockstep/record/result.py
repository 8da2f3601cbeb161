"""The result of a run: the value of `train`, stored in `summary.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Scores:
    """An exact evaluation: `top1` and `top5` as shares of `samples`, `loss` as the mean over them."""

    top1: float
    top5: float
    loss: float
    samples: int


COVERS = {
    "top1 top5 loss samples best_top1": "the whole set that best_on names, by all ranks; all but best_top1 are of the "
    "last weights",
    "test test_best": "the whole test set, by all ranks: the last weights, and those of checkpoints/best",
    "epoch_s": "the whole run, resumed parts included",
    "images_per_s": "all ranks' training images, since the last start",
    "step_p50_s step_p95_s data_wait_s": "rank 0, since the last start",
    "proof": "all ranks, since the last start; cost_s is rank 0's",
    "peak_memory_bytes": "the sum over all ranks of each process's peak: resident (host), allocated (device)",
}
"""The ranks and the time that each number of a result covers; a part of `summary.json`."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The outcome of a run; the names are those of `summary.json`.

    Rates, step times and memory are None if this process trained no step.
    """

    top1: float
    top5: float
    loss: float
    best_top1: float
    samples: int
    steps: int
    epoch_s: tuple[float, ...]
    images_per_s: float | None = None
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    data_wait_s: float | None = None
    peak_memory_bytes: dict[str, int] | None = None
    proof: dict[str, Any] | None = None  # {name: the fields of a `Check`}
    best_on: str = "test set"  # the set that selects the best weights: the validation set, if there is one
    test: dict[str, Any] | None = None  # scores of the last weights on the test set, and their step
    test_best: dict[str, Any] | None = None  # of the best weights, with a validation set; None if they are gone
    stopped: str = ""  # why the run stopped before its last step, in a clause
    output: str = ""
    exit: int = 0

    @classmethod
    def unfinished(cls, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `summary.json` of an unfinished run: all fields, None if not in `facts`."""
        return {item.name: facts.get(item.name) for item in dataclasses.fields(cls)} | {"covers": COVERS}

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self) | {"epoch_s": list(self.epoch_s), "covers": COVERS}
