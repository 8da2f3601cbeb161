"""TensorBoard's event files, in the run's folder. `tensorboard --logdir runs` shows the curves.

torch's SummaryWriter passes events to a thread, which dies with a traceback on a full disk. Here a full disk is an
OSError, and events wait until there is room.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from ..files import Appended
from ..printable import visible
from .base import Recorder, curves


class TensorBoard(Recorder):
    """Writes numbers as curves over optimizer steps, and the config.

    `config` is {option: value} in full; its options `identity`, with the choices of `auto`, are the hyper-parameters.
    TensorBoard drops the points of earlier parts of the run after `resume_step`.
    """

    def __init__(
        self, folder: Path, *, config: Mapping[str, Any], identity: Collection[str], resume_step: int = 0
    ) -> None:
        self._config, self._identity, self._resume_step = config, identity, resume_step
        # TensorBoard reads the files in the order of their names; nanoseconds keep a quick resume in order.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appended(folder / name)
        self._has_begun = False

    def __str__(self) -> str:
        return "TensorBoard's events"

    def record(self, event: str, **fields: Any) -> None:
        """Write the curves of the event."""
        if event == "start":
            self._write(fields["first_step"], self._config_values(fields["chosen"]))
        elif points := curves(event, fields):
            self._write(fields["step"], [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()])

    def close(self) -> None:
        """Write the waiting events and close the file."""
        self._file.close()

    def _config_values(self, chosen: Mapping[str, Any]) -> list[Any]:
        """Return the config as a text table, and as hyper-parameters for TensorBoard's tab of that name."""
        rows = [f"| {name} | {_cell(value)} |" for name, value in self._config.items() if value is not None]
        text = "\n".join(["| option | value |", "| --- | --- |", *rows])
        options = {key: self._config[key] for key in self._identity} | dict(chosen)
        hyperparameters = {
            key: value if isinstance(value, int | float) else _cell(value)
            for key, value in options.items()
            if value is not None
        }
        # Without a trial name: by default, TensorBoard merges runs with equal values.
        return [*text_pb("config/text_summary", text).value, *hparams_pb(hyperparameters, trial_id="").value]

    def _write(self, step: int, values: list[Any]) -> None:
        now = time.time()
        events = [Event(wall_time=now, step=step, summary=Summary(value=values))]
        if not self._has_begun:
            begin = SessionLog(status=SessionLog.START)
            first = Event(wall_time=now, file_version="brain.Event:2")
            events = [first, Event(wall_time=now, step=self._resume_step + 1, session_log=begin), *events]
        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        self._has_begun = True
        self._file.write(records.getvalue())


def _cell(value: Any) -> str:
    return visible(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)).replace("|", "\\|")
