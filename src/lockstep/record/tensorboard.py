"""TensorBoard's event files, in the run's folder: `tensorboard --logdir runs` shows the curves.

The records are written by tensorboard's own writer, here and now, without torch's SummaryWriter: that one hands them to
a thread, which dies with a printed traceback where the disk is full. Here a full disk is an OSError like any other, and
the next event starts a new file (TensorBoard reads all of them).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_PREFIX = {"log": "train", "eval": "eval"}
_NOT_CURVES = ("step", "samples")


def scalars(event: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield `(tag, value)` of each curve in an event: `train/loss`, `train/lr`, `eval/top1` …; none for most events."""
    prefix = _PREFIX.get(event)
    if prefix is not None:
        for name, value in fields.items():
            if isinstance(value, int | float) and name not in _NOT_CURVES:
                yield f"{prefix}/{name}", float(value)


class TensorBoard:
    """Writes the numbers of `log` and `eval` as curves over optimizer steps.

    `resume_step`, where a run goes on after that step, makes TensorBoard drop what an earlier part of the run had
    written for later ones.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        self._folder = folder
        self._resume_step = resume_step
        self._file: BinaryIO | None = None

    def __str__(self) -> str:
        return "TensorBoard's events"

    def record(self, event: str, **fields: Any) -> None:
        """Write the curves of the event."""
        if event not in _PREFIX:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event, fields)]
        self._write(Event(wall_time=time.time(), step=fields["step"], summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            RecordWriter(self._file).write(event.SerializeToString())
        except OSError:
            # The file may end in half a record, after which TensorBoard would read nothing more.
            self.close()
            raise

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        # TensorBoard reads the files in the order of their names; nanoseconds keep a quick resume in order.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("wb", buffering=0)
        RecordWriter(self._file).write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        if self._resume_step is not None:
            start = Event(wall_time=now, step=self._resume_step + 1, session_log=SessionLog(status=SessionLog.START))
            RecordWriter(self._file).write(start.SerializeToString())
            self._resume_step = None
