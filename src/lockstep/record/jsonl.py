"""`steps.jsonl`: every event of the run, one JSON object a line, to the last bit of each float.

Each event is written when it is recorded (optimizer steps come together, once an interval), in one write: a killed
process loses one interval at most, and only the last line of the file can be cut. Where the disk is full, the lines
wait in memory and go out with the next event that finds room; what was written of them is taken back, so that the
file stays whole lines.

JSON has no NaN and no infinities: `files.legal` says how they are written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import append_whole, legal, lines_of, ours, parse_json, understanding, write_whole
from ..printable import visible_json

# JSON escapes control characters inside strings, so this separator can be told from all that a value may hold. One
# encoder call for a whole interval takes half the time of a call for each line.
_MARK = "\x1e"
_ENCODE_FLAT = json.JSONEncoder(allow_nan=False, separators=(_MARK, ": ")).encode
_ENCODE = json.JSONEncoder(allow_nan=False).encode


def encode(rows: list[dict[str, Any]]) -> str:
    """Return one line of JSON for each row; the values are flat (no lists, no objects)."""
    if not rows:
        return ""
    try:
        text = _ENCODE_FLAT(rows)
    except ValueError:
        return "".join(_ENCODE(legal(row)) + "\n" for row in rows)
    return text[1:-1].replace(f"}}{_MARK}{{", "}\n{").replace(_MARK, ", ") + "\n"


class JsonLines:
    """Appends events to the file at `path`."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: what is written is the kernel's, and survives the end of this process.
        self._name = path.name
        self._file = open(path, "ab", buffering=0, opener=ours)
        self._waiting = b""

    def __str__(self) -> str:
        return self._name

    def record(self, event: str, **fields: Any) -> None:
        """Write the event as a line; `steps` as a line `step` for each of its rows."""
        if event == "steps":
            self._write(encode([{"event": "step", **row} for row in fields["rows"]]))
        else:
            self._write(visible_json(_ENCODE(legal({"event": event, **fields}))) + "\n")

    def close(self) -> None:
        """Write what had found no room so far, and have the disk confirm the file."""
        with self._file:
            self._write("")
            os.fsync(self._file.fileno())

    def _write(self, lines: str) -> None:
        self._waiting += lines.encode()
        append_whole(self._file, self._waiting)
        self._waiting = b""


class Sums:
    """What the steps of the epoch under way have come to, in the run's order."""

    def __init__(self, before: int = 0) -> None:
        """`before` are the run's steps before this epoch."""
        self._before, self._steps, self._loss, self._samples = before, 0, 0.0, 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a step."""
        loss, samples = row.get("loss"), row.get("samples")
        self._steps += 1
        if isinstance(loss, float) and isinstance(samples, int):
            self._loss += loss * samples
            self._samples += samples
        else:  # in a damaged file
            self._loss = math.nan

    def means(self, step: int, epoch_s: float) -> dict[str, float]:
        """Return `epoch_loss`, the mean over `samples`, and `epoch_samples_per_s` of the epoch that ends with `step`.

        Empty where some of its steps are in another folder, from which the run went on.
        """
        if self._steps != step - self._before or not self._samples or not math.isfinite(self._loss) or not epoch_s > 0:
            return {}
        mean, rate = self._loss / self._samples, self._samples / epoch_s
        return {"epoch_loss": mean, "samples": self._samples, "epoch_samples_per_s": rate}


def rewind(path: Path, *, step: int) -> Sums:
    """Cut the file back to what had happened by `step`, atomically, so that a resumed run goes on from there.

    Returns what the steps of the epoch under way have come to. Events of a later step go, and those without a step
    that came after one; so does a last line that a kill cut short. A file that is not there is left so.
    """
    sums = Sums()
    if not path.exists():
        return sums
    kept, beyond = [], False
    with understanding(path):
        for line in lines_of(path):
            try:
                row = parse_json(line)
            except ValueError:
                continue
            if not line.endswith(b"\n") or not isinstance(row, dict):
                continue
            at = row.get("step")
            later = beyond if at is None else at > step
            beyond = beyond or later
            if not later:
                kept.append(line)
                if row.get("event") == "epoch":
                    sums = Sums(row["step"])
                elif row.get("event") == "step":
                    sums.add(row)
    write_whole(path, b"".join(kept))
    return sums
