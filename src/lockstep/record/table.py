"""Which recorders a run has: one line each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..files import write_whole
from ..options import recorded, to_toml
from ..screen import Screen
from ..topology import Topology
from .base import FromStart, Recorder, Recorders
from .console import Notices, Terminal
from .epochs import Epochs, Sums
from .jsonl import JsonLines, rewind
from .manifest import Manifest, Summary
from .tensorboard import TensorBoard


def build(
    folder: Path,
    *,
    topology: Topology,
    hardware: Mapping[str, Any],
    config: RunConfig,
    identity: Collection[str],
    resume_step: int | None = None,
    console: Recorder | None = None,
    only: Collection[str] | None = None,
) -> Recorder:
    """Return rank 0's recorder, which writes to the run's `folder` and shows the run to whoever started it.

    `hardware` are facts about this machine, for the manifest, and `config` is what was asked for, of which the options
    `identity` make the run, and those in `only` (by default all) have to do with it. `resume_step` is the step after
    which a resumed run goes on: what was recorded of later ones is cut off. `console` replaces what this process's own
    terminal or log file would show. Nothing is opened
    before the `start` event, which raises OSError where `folder` is not writable.
    """

    shown = console or Terminal.detect()
    if config.record.quiet:  # standard output is that of a user's own script, where there is one
        shown = Notices(Screen(stderr=console is not None), quiet=True)

    def opens() -> Recorder:
        # Not before: a run that is refused leaves the config of the one that it would have continued.
        write_whole(folder / "config.toml", to_toml(config, only).encode())
        sums = Sums() if resume_step is None else rewind(folder / "steps.jsonl", step=resume_step)
        recorders = Recorders(
            [
                JsonLines(folder / "steps.jsonl"),
                TensorBoard(folder, config=recorded(config, only), identity=identity, resume_step=resume_step),
                Manifest(folder, topology=topology, hardware=hardware),
                Summary(folder),
                shown,  # the last: it tells which files are there, and what failed
            ]
        )
        return Epochs(recorders, sums)

    return FromStart(opens)
