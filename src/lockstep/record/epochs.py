"""What events say besides what the loop knows: when they came, and an epoch's means over its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from .base import Recorder


class Sums:
    """What the steps of the epoch under way have come to, in the run's order."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, before: int) -> None:
        self._before = before
        self._first: int | None = None
        self._loss = 0.0
        self._samples = 0

    def add(self, event: str, row: Mapping[str, Any]) -> None:
        """Take a `step` or `epoch` event; others are none of its business."""
        if event == "epoch":
            self._begin(row["step"])
        elif event == "step":
            loss, samples = row.get("loss"), row.get("samples")
            self._first = row["step"] if self._first is None else self._first
            if isinstance(loss, float) and isinstance(samples, int):
                self._loss += loss * samples
                self._samples += samples
            else:  # in a damaged file
                self._loss = math.nan

    def means(self, epoch_s: float) -> dict[str, float]:
        """Return `epoch_loss`, the mean over `samples`, and `epoch_samples_per_s`.

        Empty where the epoch's first steps are in another folder, from which the run went on.
        """
        if self._first != self._before + 1 or not self._samples or not math.isfinite(self._loss) or not epoch_s > 0:
            return {}
        mean, rate = self._loss / self._samples, self._samples / epoch_s
        return {"epoch_loss": mean, "samples": self._samples, "epoch_samples_per_s": rate}


class Epochs:
    """Passes all events on, and adds to each `epoch` the means over the epoch's steps, from `sums` on.

    Each event but `steps` gets its `time`. That would cost a step 0.8 µs in `steps.jsonl`, a third of what it costs
    there in all, and the `log` event of its interval tells.
    """

    def __init__(self, recorder: Recorder, sums: Sums) -> None:
        self._recorder = recorder
        self._sums = sums

    def record(self, event: str, **fields: Any) -> None:
        """Pass the event on."""
        if event == "steps":
            for row in fields["rows"]:
                self._sums.add("step", row)
        elif event == "epoch":
            means = self._sums.means(fields["epoch_s"])
            self._sums.add(event, fields)
            fields |= means
        if event != "steps":
            fields.setdefault("time", time.time())  # last: tools look for `"event": …, "step": …`
        self._recorder.record(event, **fields)

    def close(self) -> None:
        """Close the recorder."""
        self._recorder.close()
