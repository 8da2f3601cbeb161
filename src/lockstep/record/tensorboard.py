"""TensorBoard's event files, in the run's folder: `tensorboard --logdir runs` shows the curves.

The records are written by tensorboard's own writer, here and now, without torch's SummaryWriter: that one hands them to
a thread, which dies with a printed traceback where the disk is full. Here a full disk is an OSError like any other:
what it took of the event is taken back, and the next one follows what is whole.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..files import append_whole

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
        self._has_begun = False

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
        """Close the file; one that never found room goes."""
        if self._file is not None:
            self._file.close()
            if not self._has_begun:
                Path(self._file.name).unlink(missing_ok=True)

    def _write(self, event: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            # TensorBoard reads the files in the order of their names; nanoseconds keep a quick resume in order.
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = (self._folder / name).open("ab", buffering=0)
        records = io.BytesIO()
        for each in [event] if self._has_begun else [*self._first(), event]:
            RecordWriter(records).write(each.SerializeToString())
        append_whole(self._file, records.getvalue())
        self._has_begun = True

    def _first(self) -> Iterator[Event]:
        """Yield what a file begins with."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        now = time.time()
        yield Event(wall_time=now, file_version="brain.Event:2")
        if self._resume_step is not None:
            yield Event(wall_time=now, step=self._resume_step + 1, session_log=SessionLog(status=SessionLog.START))
