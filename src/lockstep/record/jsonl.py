"""`steps.jsonl`: every event of the run, one JSON object a line. Floats keep every bit.

Each event is one write: a killed process loses one interval at most, and only the last line can be cut. On a full
disk, lines wait in memory. `files.legal` defines the form of NaN and infinities.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files import Appended, legal, lines_of, parse_json, understanding, write_whole
from ..printable import visible_json
from .base import Epoch, Recorder

_ENCODE = json.JSONEncoder(allow_nan=False).encode


class JsonLines(Recorder):
    """Appends events to the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._name, self._file = path.name, Appended(path)

    def __str__(self) -> str:
        return self._name

    def record(self, event: str, **fields: Any) -> None:
        """Write the event as a line; `steps` as one line per row, with the event `step`."""
        rows = (
            [{"event": "step", **row} for row in fields["rows"]] if event == "steps" else [{"event": event, **fields}]
        )
        try:
            lines = [_ENCODE(row) for row in rows]
        except ValueError:
            lines = [_ENCODE(legal(row)) for row in rows]
        self._file.write("".join(f"{visible_json(line)}\n" for line in lines).encode())

    def close(self) -> None:
        """Write the waiting lines and sync the file."""
        self._file.close()


def rewind(path: Path, *, step: int) -> Epoch:
    """Truncate the file to `step`, atomically; return the current epoch.

    Removes events of later steps, events without a step that follow one, and a last line that a kill cut short.
    """
    epoch, lines, beyond = Epoch(), list[bytes](), False
    if not path.exists():
        return epoch
    with understanding(path):
        for line in lines_of(path):
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if not line.endswith(b"\n") or not isinstance(row, dict):
                continue
            event_step = row.get("step")
            later = beyond if event_step is None else event_step > step
            beyond = beyond or later
            if not later:
                lines.append(line)
                if row.get("event") == "epoch":
                    epoch = Epoch(row["step"])
                elif row.get("event") == "step":
                    epoch.add(row)
    write_whole(path, b"".join(lines))
    return epoch
