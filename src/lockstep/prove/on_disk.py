"""The records of a run as they lie on the disk, read so that nothing in them can raise: damage is told, not met.

A run is started once, and again each time that it is resumed. What one start has left in `steps.jsonl`, from its
`start` event up to the next one's, is a `Part` here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from .. import files
from ..checkpoint import peek
from ..config import RunConfig
from ..errors import RequestError
from ..files import lines_of, parse_json
from ..folders import run_of
from ..options import read_toml

CONFIG, MANIFEST, STEPS, SUMMARY = "config.toml", "manifest.json", "steps.jsonl", "summary.json"
SCORES = ("top1", "top5", "loss", "samples")
"""What an evaluation gives; an `eval` event, a summary and a checkpoint have it by these names."""
_STOPPED = 75

_NUMBER = (int, float, NoneType)
"""None, since a number that JSON lacks is written as null."""
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "start": {"first_step": (int,), "total_steps": (int,), "steps_per_epoch": (int,), "epochs": (int,)}
    | {"epoch_s": (list,), "plan": (dict,)},
    "step": {"step": (int,), "epoch": (int,), "samples": (int,), "loss": _NUMBER, "lr": _NUMBER},
    "evaluate": {"step": (int,), "samples": (int,)},
    "eval": {"step": (int,), "epoch": (int,), "samples": (int,), "top1": _NUMBER, "top5": _NUMBER, "loss": _NUMBER},
    "test": {"step": (int,), "of": (str,), "of_step": (int,), "samples": (int,)}
    | {"top1": _NUMBER, "top5": _NUMBER, "loss": _NUMBER},
    "epoch": {"step": (int,), "epoch": (int,), "epoch_s": _NUMBER},
    "checkpoint": {"step": (int,)},
    "finish": {"exit": (int,)},
    "failed": {"exit": (int,)},
}
"""Of the events that are judged, what they must have; of others, nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One event, and the line of `steps.jsonl` that it stands in, from 1."""

    line: int
    event: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def at(self) -> str:
        """Where it stands, in words."""
        return f"{STEPS} line {self.line}"


@dataclass(frozen=True)
class Part:
    """What one start of the run has left: its `start` event, those after it, and how it ended."""

    start: Row
    rows: tuple[Row, ...]
    end: Row | None
    """`finish` or `failed`; None where it was killed, or still runs."""

    @property
    def first_step(self) -> int:
        """The step after which this part begins."""
        return int(self.start["first_step"])

    @property
    def last_step(self) -> int:
        """The last optimizer step of this part, or the one it began after."""
        return int(next((row["step"] for row in reversed(self.rows) if row.event == "step"), self.first_step))


def is_own_loop(run: Records) -> bool:
    """Whether the run is one of a loop of the user's own, in a session."""
    return bool(run.parts) and _begins_own_loop(run.parts[0].start.fields)


def _begins_own_loop(start: Mapping[str, Any]) -> bool:
    chosen = start.get("chosen")
    return isinstance(chosen, dict) and chosen.get("loop") == "own"


def keeps_ledger(part: Part) -> bool:
    """Return whether this start was asked for a ledger: those after it go on with that."""
    chosen = part.start.fields.get("chosen")
    return isinstance(chosen, Mapping) and chosen.get("ledger") is True


@dataclass(frozen=True)
class Records:
    """What lies in a run's folder."""

    folder: Path
    config: RunConfig | None
    manifest: Mapping[str, Any] | None
    summary: Mapping[str, Any] | None
    """None where there is none, and where it is of an earlier start than the last one."""
    has_old_summary: bool
    """Whether there is one of an earlier start."""
    parts: tuple[Part, ...]
    metas: Mapping[str, Mapping[str, Any]]
    """What the checkpoints `last` and `best` say of themselves, as far as that can be read; nothing is verified."""
    damage: tuple[str, ...]
    """What is missing, damaged or cut short, file by file."""

    def rows(self, *events: str) -> Iterator[Row]:
        """Yield the events of these kinds, in their order."""
        return (row for part in self.parts for row in part.rows if row.event in events)

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
        if self.parts and (end := self.parts[-1].end) is not None:
            return int(end["exit"])
        return None if self.summary is None else whole(self.summary.get("exit"))

    @property
    def unfinished(self) -> str:
        """Why the run has no end yet, as a clause; "" for one that is complete."""
        if not self.parts or self.exit == 0:
            return ""
        total = self.parts[-1].start["total_steps"]  # 0 where nobody knows, as of a stream
        whole = f"step {self.last_step:,}" + (f" of {total:,}" if total else "")
        if self.exit is None:
            return f"it was killed after {whole}, or still runs"
        if self.exit == _STOPPED:
            return f"it was stopped on request at {whole}, and can be resumed"
        return f"it failed at {whole} with exit code {self.exit}"

    def lacking(self, *files: str) -> str:
        """Return why these files cannot be judged by, as a clause; "" where they can."""
        there = {CONFIG: self.config, MANIFEST: self.manifest, STEPS: self.parts or None}
        return " and ".join(f"{name} cannot be read" for name in files if there[name] is None)


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
    config = None
    try:
        config = read_toml(folder / CONFIG)
    except RequestError as error:
        damage.append(str(error).rstrip("."))
    manifest = _json_object(folder / MANIFEST, damage)
    # One that holds nothing but proofs was made by whoever judged the run, not by the run.
    summary = _json_object(folder / SUMMARY, damage) if (folder / SUMMARY).exists() else None
    summary = summary if summary and "exit" in summary else None
    parts, torn = _parts(folder / STEPS, damage)
    is_old = summary is not None and bool(parts) and _is_old(summary, parts)
    records = Records(
        folder=folder,
        config=config,
        manifest=manifest,
        summary=None if is_old else summary,
        has_old_summary=is_old,
        parts=parts,
        metas={name: meta for name in ("last", "best") if (meta := peek(folder / "checkpoints" / name)) is not None},
        damage=(),
    )
    return dataclasses.replace(records, damage=(*damage, *_unended(records, torn)))


def _json_object(path: Path, damage: list[str]) -> dict[str, Any] | None:
    try:
        held = parse_json(files.read(path))
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error.strerror}")
        return None
    except ValueError:
        held = None
    if not isinstance(held, dict):
        damage.append(f"{path.name} is no whole JSON object")
        return None
    return held


def _parts(path: Path, damage: list[str]) -> tuple[tuple[Part, ...], str]:
    """Return what each start has left, and the end of a last line that was cut."""
    rows: list[Row] = []
    torn = b""
    try:
        for number, line in enumerate(lines_of(path), start=1):
            if not line.endswith(b"\n"):
                torn = line
                break
            row = _row(number, line)
            if isinstance(row, str):
                damage.append(f"{path.name} line {number} {row}")
            else:
                rows.append(row)
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error.strerror}")
        return (), ""
    if not rows or rows[0].event != "start":
        damage.append(f"{path.name} does not begin with the event of a start")
        return (), ""
    begins = [index for index, row in enumerate(rows) if row.event == "start"]
    return tuple(_part(rows[a:b]) for a, b in zip(begins, [*begins[1:], len(rows)], strict=True)), torn.decode(
        errors="replace"
    )


def _row(number: int, line: bytes) -> Row | str:
    """Return the event in a line, or what is wrong with it."""
    try:
        fields = parse_json(line)
    except ValueError:
        return "is no JSON"
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return "is no event"
    event = fields["event"]
    wanted = _FIELDS.get(event, {}).items()
    # Exactly: a bool is no number here.
    if lacking := [name for name, _ in wanted if name not in fields]:
        return f"is an event {event} that lacks {' and '.join(lacking)}"
    bad = [name for name, kinds in wanted if type(fields[name]) not in kinds]
    if event == "start" and not bad:
        plan = {name: fields["plan"].get(name) for name in ("global_size", "ranks", "accumulation")}
        counts = {"steps_per_epoch": fields["steps_per_epoch"], "epochs": fields["epochs"]}
        positive = counts | plan
        if _begins_own_loop(fields):  # which may have no DataLoader, a stream, or no epochs
            positive = plan if fields["plan"] else {}
            bad = [name for name, value in counts.items() if value < 0]
        bad += [name for name, value in positive.items() if (whole(value) or 0) < 1]
    return f"is an event {event} whose {' and '.join(bad)} cannot be" if bad else Row(number, event, fields)


def _part(rows: list[Row]) -> Part:
    ends = [row for row in rows if row.event in ("finish", "failed")]
    return Part(rows[0], tuple(rows), ends[-1] if ends else None)


def _is_old(summary: Mapping[str, Any], parts: tuple[Part, ...]) -> bool:
    """Whether the summary is an earlier start's: a run that was resumed and then killed leaves that one behind."""
    last, steps = parts[-1], summary.get("steps")
    if last.end is not None or (len(parts) == 1 and last.first_step == 0):
        return False
    if summary["exit"] is None:  # as the last start has marked it
        return True
    before = [(part.last_step, part.end["exit"]) for part in parts[:-1] if part.end is not None]
    return steps != last.last_step or (steps, summary.get("exit")) in before


def _unended(records: Records, torn: str) -> Iterable[str]:
    """Yield what is wrong with the end of `steps.jsonl`: of a run that was not killed, the last line is its end."""
    if not records.parts:
        return
    is_ended = records.parts[-1].end is not None
    if torn and (is_ended or records.summary is not None):
        yield f"the last line of {STEPS} is cut short ({torn[:40]} …)"
    if not is_ended and records.summary is not None:
        yield (
            f"{STEPS} lacks the end of the run, which {SUMMARY} has (exit code {records.summary['exit']} at step "
            f"{records.summary.get('steps')})"
        )


def whole(value: Any) -> int | None:
    """Return `value` if it is a whole number."""
    return value if type(value) is int else None


def is_finite(value: Any) -> bool:
    """Whether `value` is a number, and a finite one."""
    return type(value) in (int, float) and abs(value) < math.inf
