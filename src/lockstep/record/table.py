"""Which recorders a run has: one line each."""

from __future__ import annotations

from pathlib import Path

from .base import Recorder, Recorders
from .console import Terminal
from .jsonl import JsonLines, rewind
from .tensorboard import TensorBoard


def build(folder: Path, *, resume_step: int | None = None, console: Recorder | None = None) -> Recorder:
    """Return rank 0's recorder, which writes to the run's `folder` and shows the run to whoever started it.

    `resume_step` is the step after which a resumed run goes on: what was recorded of later ones is cut off. `console`
    replaces what this process's own terminal or log file would show. Raises OSError where `folder` is not writable.
    """
    if resume_step is not None:
        rewind(folder / "steps.jsonl", step=resume_step)
    return Recorders(
        [
            console or Terminal.detect(),
            JsonLines(folder / "steps.jsonl"),
            TensorBoard(folder, resume_step=resume_step),
        ]
    )
