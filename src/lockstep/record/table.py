"""Which recorders a run has, and what is added to its events: when they came, and an epoch's means."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..config.options import recorded, to_toml
from ..config.schema import RunConfig
from ..files import write_whole
from ..screen import Screen
from ..world.topology import Topology
from .base import Nothing, Recorder, Recorders
from .console import Notices, Terminal
from .jsonl import JsonLines, Sums, rewind
from .manifest import Manifest, Summary
from .tensorboard import TensorBoard


class _Run:
    """Opens its recorders at the `start` event: a run that is refused before that leaves what was there untouched.

    Adds to each `epoch` the means over the epoch's steps, and `time` to each event but `steps`. That would cost a step
    0.8 µs in `steps.jsonl`, a third of what it costs there in all, and the `log` event of its interval tells.
    """

    def __init__(self, opens: Callable[[], tuple[Recorder, Sums]]) -> None:
        self._opens = opens
        self._recorder: Recorder = Nothing()
        self._sums = Sums()

    def record(self, event: str, **fields: Any) -> None:
        if event == "start":
            self._recorder, self._sums = self._opens()
        elif event == "steps":
            for row in fields["rows"]:
                self._sums.add(row)
        elif event == "epoch":
            fields |= self._sums.means(fields["step"], fields["epoch_s"])
            self._sums = Sums(fields["step"])
        if event != "steps":
            fields.setdefault("time", time.time())  # last: tools look for `"event": …, "step": …`
        self._recorder.record(event, **fields)

    def close(self) -> None:
        self._recorder.close()


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
    terminal or log file would show. Nothing is opened before the `start` event, which raises OSError where `folder` is
    not writable.
    """
    shown = console or Terminal.detect()
    if config.record.quiet:  # standard output is that of a user's own script, where there is one
        shown = Notices(Screen(stderr=console is not None), quiet=True)

    def opens() -> tuple[Recorder, Sums]:
        # Not before: a run that is refused leaves the config of the one that it would have continued.
        write_whole(folder / "config.toml", to_toml(config, only).encode())
        sums = Sums() if resume_step is None else rewind(folder / "steps.jsonl", step=resume_step)
        recorders = (
            JsonLines(folder / "steps.jsonl"),
            TensorBoard(folder, config=recorded(config, only), identity=identity, resume_step=resume_step),
            Manifest(folder, topology=topology, hardware=hardware),
            Summary(folder),
            shown,  # the last: it tells which files are there, and what failed
        )
        return Recorders(recorders), sums

    return _Run(opens)
