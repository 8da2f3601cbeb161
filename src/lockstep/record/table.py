"""Which recorders a run has: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..topology import Topology
from .base import FromStart, Recorder, Recorders
from .console import Terminal
from .jsonl import JsonLines, rewind
from .manifest import Manifest, Summary
from .tensorboard import TensorBoard


def build(
    folder: Path,
    *,
    topology: Topology,
    hardware: Mapping[str, Any],
    config_toml: str,
    resume_step: int | None = None,
    console: Recorder | None = None,
) -> Recorder:
    """Return rank 0's recorder, which writes to the run's `folder` and shows the run to whoever started it.

    `hardware` are facts about this machine, for the manifest, and `config_toml` is what was asked for. `resume_step` is
    the step after which a resumed run goes on: what was recorded of later ones is cut off. `console` replaces what this
    process's own terminal or log file would show. Nothing is opened before the `start` event, which raises OSError
    where `folder` is not writable.
    """

    def opens() -> Recorder:
        # Not before: a run that is refused leaves the config of the one that it would have continued.
        write_whole(folder / "config.toml", config_toml.encode())
        if resume_step is not None:
            rewind(folder / "steps.jsonl", step=resume_step)
        return Recorders(
            [
                JsonLines(folder / "steps.jsonl"),
                TensorBoard(folder, resume_step=resume_step),
                Manifest(folder, topology=topology, hardware=hardware),
                Summary(folder),
                console or Terminal.detect(),  # the last: it tells which files are there, and what failed
            ]
        )

    return FromStart(opens)
