"""The records of a run as they lie on the disk, read so that nothing in them can raise: damage is told, not met.

A run is started once, and again each time that it is resumed. What one start has left in `steps.jsonl`, from its
`start` event up to the next one's, is a part here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .. import files
from ..checkpoint import peek
from ..config.options import read_toml
from ..config.schema import RunConfig
from ..errors import RequestError
from ..files import lines_of, parse_json, understanding
from ..runs.folders import run_of

CONFIG, MANIFEST, STEPS, SUMMARY = "config.toml", "manifest.json", "steps.jsonl", "summary.json"
_STOPPED = 75
_WHOLE: Mapping[str, tuple[str, ...]] = {
    "start": ("first_step", "total_steps", "steps_per_epoch", "epochs"),
    "step": ("step", "epoch", "samples"),
    **dict.fromkeys(("evaluate", "eval", "test"), ("step", "samples")),
    "checkpoint": ("step",),
    **dict.fromkeys(("finish", "failed"), ("exit",)),
}
"""The whole numbers that an event must have; of others, nothing."""
_MOST = 100
"""Lines that cannot be read, after which no more are looked at."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    event: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def at(self) -> str:
        return f"{STEPS} line {self.line}"


@dataclass(frozen=True)
class _Part:
    """What one start of the run has left, from its `start` event on."""

    rows: tuple[_Row, ...]

    @property
    def start(self) -> _Row:
        return self.rows[0]

    @property
    def end(self) -> _Row | None:
        """`finish` or `failed`; None where it was killed, or still runs."""
        return next((row for row in reversed(self.rows) if row.event in ("finish", "failed")), None)

    @property
    def chosen(self) -> Mapping[str, Any]:
        """What each `auto` came to."""
        chosen = self.start.fields.get("chosen")
        return chosen if isinstance(chosen, dict) else {}

    @property
    def first_step(self) -> int:
        """The step after which this part begins."""
        return int(self.start["first_step"])

    @property
    def last_step(self) -> int:
        """The last optimizer step of this part, or the one it began after."""
        return int(next((row["step"] for row in reversed(self.rows) if row.event == "step"), self.first_step))


@dataclass(frozen=True)
class Records:
    """What lies in a run's folder; None and nothing for what cannot be read, which `damage` tells."""

    folder: Path
    config: RunConfig | None
    manifest: Mapping[str, Any] | None
    summary: Mapping[str, Any] | None
    """None, too, where it is of an earlier start than the last one."""
    parts: tuple[_Part, ...]
    metas: Mapping[str, Mapping[str, Any]]
    """What the checkpoints `last` and `best` say of themselves; nothing is verified."""
    damage: tuple[str, ...]
    """What is missing, damaged or cut short, file by file."""

    def rows(self, *events: str) -> list[_Row]:
        """Return the events of these kinds, in their order."""
        return [row for part in self.parts for row in part.rows if row.event in events]

    @property
    def is_own_loop(self) -> bool:
        """Whether a loop of the user's own trained, in a session."""
        return bool(self.parts) and self.parts[0].chosen.get("loop") == "own"

    @property
    def first_step(self) -> int:
        """The step after which this folder's records begin: 0, unless the run was begun in another folder."""
        return self.parts[0].first_step

    @property
    def last_step(self) -> int:
        """The last recorded optimizer step."""
        return self.parts[-1].last_step

    @property
    def exit(self) -> int | None:
        """How the last start ended, as an exit code; None where it was killed, or still runs."""
        end = self.parts[-1].end if self.parts else None
        return None if end is None else int(end["exit"])

    @property
    def unfinished(self) -> str:
        """Why the run has no end yet, as a clause; "" for one that is complete."""
        if not self.parts or self.exit == 0:
            return ""
        total = self.parts[-1].start["total_steps"]  # 0 where nobody knows, as of a stream
        at = f"step {self.last_step:,}" + (f" of {total:,}" if total else "")
        if self.exit is None:
            return f"it was killed after {at}, or still runs"
        if self.exit == _STOPPED:
            return f"it was stopped on request at {at}, and can be resumed"
        return f"it failed at {at} with exit code {self.exit}"


def find(path: Path) -> Path:
    """Return the run's folder that `path` is, or that the checkpoint at `path` lies in.

    Raises `RequestError` where there is none.
    """
    folder = run_of(path) or path
    if (folder / STEPS).is_file() or (folder / MANIFEST).is_file():
        return folder
    found = f"lies in no run's folder: there is neither {STEPS} nor {MANIFEST}" if path.exists() else "is not there"
    raise RequestError(f"{path} {found}; give a run's folder, such as runs/NAME, or one of its checkpoints.")


def read(folder: Path) -> Records:
    """Return the records in a run's folder; whatever cannot be read is left out and told in `damage`."""
    damage: list[str] = []
    rows: list[_Row] = []
    torn = False

    def understood(name: str, load: Callable[[], _T]) -> _T | None:
        try:
            with understanding(Path(name)):
                return load()
        except RequestError as error:
            damage.append(str(error).partition(";")[0].rstrip("."))
            return None

    lines = understood(STEPS, lambda: list(lines_of(folder / STEPS))) or []
    for number, line in enumerate(lines, start=1):
        torn = not line.endswith(b"\n")
        if len(damage) > _MOST:
            break
        if not torn and (row := understood(f"{STEPS} line {number}", lambda: _row(number, line))):  # noqa: B023
            rows.append(row)
    if not rows or rows[0].event != "start":
        damage.append(f"{STEPS} does not begin with the event of a start")
        rows = []
    begins = [*(index for index, row in enumerate(rows) if row.event == "start"), len(rows)]
    parts = tuple(_Part(tuple(rows[begin:end])) for begin, end in itertools.pairwise(begins))
    config = understood(CONFIG, lambda: read_toml(folder / CONFIG))
    manifest = understood(MANIFEST, lambda: _json_object(folder / MANIFEST))
    summary = understood(SUMMARY, lambda: _json_object(folder / SUMMARY)) if (folder / SUMMARY).exists() else None
    # A start marks the summary of the one before it as ended by nothing; one without an end holds proofs alone.
    summary = None if summary is None or summary.get("exit") is None else summary
    if parts and parts[-1].end is None and summary is not None:
        damage.append(f"{STEPS} lacks the end of the run, which {SUMMARY} has (exit code {summary['exit']})")
    elif torn and (not parts or parts[-1].end is not None):  # as no kill leaves it
        damage.append(f"the last line of {STEPS} is cut short")
    metas = {name: meta for name in ("last", "best") if (meta := peek(folder / "checkpoints" / name)) is not None}
    return Records(folder, config, manifest, summary, parts, metas, tuple(damage))


def _json_object(path: Path) -> dict[str, Any]:
    return {**parse_json(files.read(path))}


def _row(number: int, line: bytes) -> _Row:
    fields = {**parse_json(line)}
    event = str(fields["event"])
    # Exactly: a bool is no number here.
    if bad := [name for name in _WHOLE.get(event, ()) if type(fields.get(name)) is not int]:
        raise ValueError(f"the event {event} has no whole number for {' and '.join(bad)}")
    return _Row(number, event, fields)


def is_finite(value: Any) -> bool:
    """Whether `value` is a number, and a finite one."""
    return type(value) in (int, float) and abs(value) < math.inf
