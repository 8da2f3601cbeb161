"""What a run tells the world: events, and whoever records them.

The engine knows one verb, `record(event, **fields)`, and calls it on rank 0; where the events go is decided once,
by whoever builds the recorder. Fields are plain numbers, strings and lists; `table` adds `time`, in seconds since
1970 (UTC), to each event but `steps`. The events:

    start       lines (printed once: batch plan, what auto chose), plan, chosen (by option), first_step, epoch_s (of the
                epochs before it), total_steps, steps_per_epoch, epochs, eval_every, best_on, output (its folder),
                covers (of whom each number of steps and log is); of a classifier also shape (of a sample) and classes
    steps       rows: for each optimizer step since the last `steps` a dict of step, epoch, loss, lr, samples, and
                grad_norm, of each step where gradients are clipped, else of an interval's last; and the user's values
    log         once an interval: step, epoch, loss and lr (of that step), samples_per_s, step_s, data_wait_s,
                eta_s, top1 (of the step's last micro-batch), and the telemetry
    evaluate    step, epoch, samples: an evaluation begins; of as in test
    eval        step, epoch, top1, top5, loss, samples, on (validation set or test set)
    test        step, of (which weights: last or best), of_step, top1, top5, loss, samples: at the end, where the best
                weights are chosen on a validation set
    checkpoint  step, path: of one that is safely on the disk
    epoch       step, epoch, epoch_s; and, as `table` adds them, epoch_loss (the mean over samples), samples and
                epoch_samples_per_s
    values      step, epoch, and values by names of the user's own
    warning     text
    proof       checks: what was proved so far, as summary.json has it
    finish      what summary.json says
    failed      exit, error

The optimizer steps come together, once an interval, because each of them may cost next to nothing: together they cost
1.8 µs a step, one by one 3.2 µs. Recorders that show things act on `log`. Losses, accuracies and rates are reduced
over the world; telemetry is rank 0's own. Accuracies are fractions, 0 to 1; epochs count from 0, steps from 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Recorder(Protocol):
    """Takes the events of one run. `str()` of it is what it writes, in the user's words."""

    def record(self, event: str, **fields: Any) -> None:
        """Take one event. Raises OSError where it cannot be written, which `Recorders` makes a warning."""

    def close(self) -> None:
        """Write what is still held back, and let go of files. Nothing is recorded afterwards."""


class Nothing:
    """Drops everything: the recorder of the ranks other than 0."""

    def record(self, event: str, **fields: Any) -> None:
        """Drop the event."""

    def close(self) -> None:
        """Do nothing."""


class Recorders:
    """Passes each event to several recorders.

    A full disk stops no training: a recorder that raises OSError misses that event, and the others are told so, once
    for each recorder, as a `warning`.
    """

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self._recorders = tuple(recorders)
        self._reported: set[Recorder] = set()

    def record(self, event: str, **fields: Any) -> None:
        """Pass the event to each recorder."""
        for recorder in self._recorders:
            try:
                recorder.record(event, **fields)
            except OSError as error:
                self._report(recorder, error)

    def close(self) -> None:
        """Close each recorder; the terminal, which is the last, can still tell what failed."""
        for recorder in self._recorders:
            try:
                recorder.close()
            except OSError as error:
                self._report(recorder, error)
            self._reported.add(recorder)  # which hears nothing more

    def _report(self, failed: Recorder, error: OSError) -> None:
        if failed in self._reported:
            return
        # Marked before the others are told, so that two recorders that fail cannot report each other for ever.
        self._reported.add(failed)
        text = f"{failed} could not be written ({error.strerror or error}); training goes on, the record may have gaps."
        for recorder in self._recorders:
            if recorder not in self._reported:
                try:
                    recorder.record("warning", text=text)
                except OSError as second:
                    self._report(recorder, second)
