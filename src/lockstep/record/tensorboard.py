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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..files import append_whole, ours
from ..printable import visible

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

_PREFIX = {"log": "train/", "eval": "eval/", "epoch": "train/", "values": "values/"}
_NOT_CURVES = ("step", "samples", "time")


def scalars(prefix: str, fields: Mapping[str, Any], without: Collection[str]) -> dict[str, float]:
    """Return {tag: value} of each curve in an event's fields."""
    return {
        f"{prefix}{name}": float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and name not in without
    }


class TensorBoard:
    """Writes numbers as curves over optimizer steps, and what was asked for.

    A point stands for its own step, and nothing is smoothed. Of each interval one step is written, since a point costs
    14 µs, as much as a step of a tiny model may: steps.jsonl has them all.

    `config` is {option: value} in full, and `identity` are those of its options that make the run: with what `auto`
    chose they are the hyper-parameters. `resume_step`, where a run goes on after that step, makes TensorBoard drop what
    an earlier part of the run had written for later ones.
    """

    def __init__(
        self, folder: Path, *, config: Mapping[str, Any], identity: Collection[str], resume_step: int | None = None
    ) -> None:
        self._folder = folder
        self._config, self._identity = config, identity
        self._resume_step = resume_step
        self._file: BinaryIO | None = None
        self._has_begun = False

    def __str__(self) -> str:
        return "TensorBoard's events"

    def record(self, event: str, **fields: Any) -> None:
        """Write the curves of the event."""
        if event == "start":
            self._write([_event(fields["first_step"], self._asked(fields))])
        elif event in _PREFIX:
            without = _NOT_CURVES if event == "log" else (*_NOT_CURVES, "epoch")
            self._write([_event(fields["step"], _points(scalars(_PREFIX[event], fields, without)))])

    def close(self) -> None:
        """Close the file; one that never found room goes."""
        if self._file is not None:
            self._file.close()
            if not self._has_begun:
                Path(self._file.name).unlink(missing_ok=True)

    def _asked(self, start: Mapping[str, Any]) -> list[Summary.Value]:
        """Return the config as a table of text, and the hyper-parameters as TensorBoard's tab of that name has them."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        rows = [f"| {name} | {_cell(value)} |" for name, value in self._config.items() if value is not None]
        text = "\n".join(["| option | value |", "| --- | --- |", *rows]).encode()
        plugin = SummaryMetadata.PluginData
        about = SummaryMetadata(plugin_data=plugin(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text])
        data = HParamsPluginData()
        data.session_start_info.start_time_secs = time.time()
        for name, value in ({key: self._config[key] for key in self._identity} | dict(start["chosen"])).items():
            if isinstance(value, bool):
                data.session_start_info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                data.session_start_info.hparams[name].number_value = value
            elif value is not None:
                data.session_start_info.hparams[name].string_value = _cell(value)
        hparams = SummaryMetadata(plugin_data=plugin(plugin_name="hparams", content=data.SerializeToString()))
        return [
            Summary.Value(tag="config/text_summary", metadata=about, tensor=tensor),
            Summary.Value(tag="_hparams_/session_start_info", metadata=hparams),
        ]

    def _write(self, events: list[Event]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            # TensorBoard reads the files in the order of their names; nanoseconds keep a quick resume in order.
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._file = open(self._folder / name, "ab", buffering=0, opener=ours)
        records = io.BytesIO()
        for each in events if self._has_begun else [*self._first(), *events]:
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


def _event(step: int, values: list[Summary.Value]) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))


def _points(values: Mapping[str, float]) -> list[Summary.Value]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _cell(value: Any) -> str:
    return visible(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)).replace("|", "\\|")
