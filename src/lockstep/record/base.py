"""Events of a run, and the interface of their recorders.

Rank 0 calls `record(event, **fields)`. Fields are plain numbers, strings and lists. The events:

    start       lines (batch plan, what auto chose), plan, chosen (by option), first_step, epoch_s (of earlier epochs),
                total_steps, steps_per_epoch, epochs, best_on, output (its folder), covers (the ranks of each
                number of steps and log); of a classifier also shape (of a sample) and classes
    steps       rows: a dict for each step since the last `steps`: step, epoch, loss, lr, samples, the user's values,
                and grad_norm (of each step where gradients are clipped, else of an interval's last)
    log         once an interval: step, epoch, loss and lr (of that step), samples_per_s, step_s, data_wait_s, eta_s
                (None where the run's length is not known), top1 (of the step's last micro-batch), and the telemetry
    evaluate    step, samples: an evaluation begins
    eval        step, epoch, score, on (validation set or test set), top1, top5, loss, samples; a script's numbers
    checkpoint  step, path; once it is synced to disk
    epoch       step, epoch, epoch_s; `Recorders` adds epoch_loss (the mean over samples), samples, epoch_samples_per_s
    values      step, epoch, and the user's values by name
    profile     step, first_step, step_s and wait_s (by rank), slowest (a rank), folder, operations (of rank 0: name,
                self_s, share); times are means of a step
    warning     text
    upload      text; the end waits for an upload
    proof       checks so far, in the form of summary.json
    finish      the fields of summary.json
    failed      exit, error

`Recorders` adds `time` to all but `steps`, in seconds since 1970 (UTC). Losses, accuracies and rates are reduced over
the world; telemetry is rank 0's. Accuracies are fractions, 0 to 1; epochs count from 0, steps from 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

_CURVES = {"log": "train/", "eval": "eval/", "epoch": "train/", "values": "values/"}
"""Events whose numbers are curves over optimizer steps, and the beginning of the curves' names."""


def curves(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return an event's numbers by curve, such as `train/loss`; {} for events without curves.

    One step per interval is on them, unaveraged: a point of TensorBoard's costs 14 µs, as long as a step of a tiny
    model.
    """
    if event not in _CURVES:
        return {}
    without = ("step", "samples", "time") if event == "log" else ("step", "samples", "time", "epoch")
    numbers = {key: value for key, value in fields.items() if isinstance(value, int | float) and key not in without}
    return {_CURVES[event] + key: value for key, value in numbers.items()}


class Recorder:
    """Drops the events of one run. `str()` names the files of a subclass, in the user's words."""

    def record(self, event: str, **fields: Any) -> None:
        """Take one event. Raises OSError for a failed write, which `Recorders` makes a warning."""

    def flush(self, limit_s: float = math.inf) -> None:
        """Wait for work in the background, for a bounded time, and at most `limit_s`."""

    def end(self) -> None:
        """Begin to close, without waiting."""

    def close(self) -> None:
        """Write pending output and close files."""


class Nothing(Recorder):
    """The recorder of the ranks other than 0."""


class Epoch:
    """Running means over the steps of the current epoch, which begins after step `start`."""

    def __init__(self, start: int = 0) -> None:
        self._start, self._steps, self._loss, self._samples = start, 0, 0.0, 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a step."""
        loss, samples = row.get("loss"), row.get("samples")
        self._steps += 1
        if isinstance(loss, float) and isinstance(samples, int):
            self._loss += loss * samples
            self._samples += samples
        else:  # in a damaged file
            self._loss = math.nan

    def means(self, step: int, epoch_s: float) -> dict[str, float]:
        """Return the means of an epoch that ends with `step`; {} if another folder has some of its steps."""
        if self._steps != step - self._start or not self._samples or not math.isfinite(self._loss) or not epoch_s > 0:
            return {}
        mean, rate = self._loss / self._samples, self._samples / epoch_s
        return {"epoch_loss": mean, "samples": self._samples, "epoch_samples_per_s": rate}


class Recorders(Recorder):
    """Passes each event to several recorders, opened at `start`: a refused run leaves its folder untouched.

    A full disk does not stop training: if a recorder raises OSError, all get one warning. Our files catch up once there
    is room.
    """

    def __init__(self, opens: Callable[[], tuple[list[Recorder], Epoch]]) -> None:
        """`opens` returns the recorders, and the current epoch's steps so far."""
        self._opens = opens
        self._recorders: list[Recorder] = []
        self._epoch = Epoch()
        self._failed: set[Recorder] = set()

    def record(self, event: str, **fields: Any) -> None:
        """Pass the event to each recorder, with its time and at an epoch's end the means over its steps."""
        if event == "start":
            self._recorders, self._epoch = self._opens()
        elif event == "steps":
            for row in fields["rows"]:
                self._epoch.add(row)
        elif event == "epoch":
            fields |= self._epoch.means(fields["step"], fields["epoch_s"])
            self._epoch = Epoch(fields["step"])
        if event != "steps":
            fields.setdefault("time", time.time())  # last: tools look for `"event": …, "step": …`
        for recorder in self._recorders:
            try:
                recorder.record(event, **fields)
            except OSError as error:
                self._warn(recorder, error, "training goes on, the record may have gaps")

    def flush(self, limit_s: float = math.inf) -> None:
        """Wait for each recorder's work in the background."""
        for recorder in self._recorders:
            recorder.flush(limit_s)

    def close(self) -> None:
        """Close each recorder. Open recorders record a warning for a failed one."""
        for recorder in self._recorders:
            recorder.end()
        while self._recorders:
            recorder = self._recorders.pop(0)
            try:
                recorder.close()
            except OSError as error:
                self._failed.discard(recorder)  # the losses are final
                self._warn(recorder, error, "the record has gaps")

    def _warn(self, recorder: Recorder, error: OSError, effect: str) -> None:
        if recorder not in self._failed:
            self._failed.add(recorder)  # before the warning, on which other recorders may fail
            text = f"{recorder} could not be written ({error.strerror or error}); {effect}."
            self.record("warning", text=text)
