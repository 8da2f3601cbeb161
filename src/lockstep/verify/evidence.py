"""What a run has left in its folder, read for judging. Any content gives a value or a clause about the damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .. import files
from ..config.options import read_toml
from ..config.schema import RunConfig
from ..errors import RequestError, Stopped
from ..files import lines_of, parse_json, understanding
from ..record.checks import Check, from_json

CONFIG, MANIFEST, STEPS, SUMMARY = "config.toml", "manifest.json", "steps.jsonl", "summary.json"
Row = Mapping[str, Any]
"""An event of steps.jsonl, with the number of its "line"."""
_T = TypeVar("_T")


class Part(NamedTuple):
    """The events from one start or resumption of the run to the next."""

    rows: Sequence[Row]

    def of(self, *events: str) -> list[Row]:
        """Return its events of these kinds."""
        return [row for row in self.rows if row["event"] in events]

    @property
    def start(self) -> Row:
        """The event that begins it."""
        return self.rows[0]

    @property
    def first_step(self) -> int:
        """The step after which it begins."""
        return int(self.start["first_step"])

    @property
    def last_step(self) -> int:
        """Its last optimizer step, or the one after which it begins."""
        return int([self.first_step, *(row["step"] for row in self.of("step"))][-1])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The content of a run's folder."""

    folder: Path
    config: RunConfig | None  # None where it cannot be read
    parts: Sequence[Part]  # none where steps.jsonl cannot be read
    held: Mapping[str, Check]  # what the run itself has checked, by name
    damage: Sequence[str]  # what cannot be read, in clauses

    def rows(self, *events: str) -> list[Row]:
        """Return the events of these kinds, of all parts."""
        return [row for part in self.parts for row in part.of(*events)]

    @property
    def is_own_loop(self) -> bool:
        """Whether the run is of a loop or a step of the user's own."""
        return any(part.start["chosen"].get("loop") == "own" for part in self.parts)

    @property
    def first_step(self) -> int:
        """The step after which the records begin: 0, unless the run was begun in another folder."""
        return self.parts[0].first_step

    @property
    def last_step(self) -> int:
        """The last optimizer step."""
        return self.parts[-1].last_step

    @property
    def exit(self) -> int | None:
        """The exit code with which the last start ended; None where it was killed, or still runs."""
        codes: list[int | None] = [None, *(row["exit"] for row in self.parts[-1].of("finish", "failed"))]
        return codes[-1]

    @property
    def unfinished(self) -> str:
        """Why the run has no end yet, as a clause; "" for one that is complete, or cannot be read."""
        if not self.parts or self.exit == 0:
            return ""
        total = self.parts[-1].start["total_steps"]  # 0 where that is not known
        where = f"step {self.last_step:,}" + (f" of {total:,}" if total else "")
        if self.exit is None:
            return f"it was killed after {where}, or still runs"
        if self.exit == Stopped.exit_code:
            return f"it was stopped on request at {where}, and can be resumed"
        return f"it failed at {where} with exit code {self.exit}"


def read(folder: Path) -> Evidence:
    """Read a run's folder. What cannot be read is damage."""
    damage: list[str] = []

    def understood(name: str, load: Callable[[], _T]) -> _T | None:
        try:
            with understanding(Path(name)):
                return load()
        except RequestError as error:
            damage.append(reason(error))
            return None

    def json_object(name: str) -> dict[str, Any]:
        return {**parse_json(files.read(folder / name))}

    lines = understood(STEPS, lambda: list(lines_of(folder / STEPS))) or []
    whole = enumerate((line for line in lines if line.endswith(b"\n")), start=1)  # a kill may cut the last one short
    found = [understood(f"{STEPS} line {number}", partial(_row, number, line)) for number, line in whole]
    rows = [row for row in found if row is not None]
    begins = [index for index, row in enumerate(rows) if row["event"] == "start"]
    if begins[:1] != [0]:
        damage.append(f"{STEPS} does not begin with the event of a start")
        begins = []
    parts = [Part(rows[begin:end]) for begin, end in zip(begins, [*begins[1:], len(rows)], strict=False)]
    config = understood(CONFIG, lambda: read_toml(folder / CONFIG))
    understood(MANIFEST, lambda: json_object(MANIFEST))
    has_ended = bool(parts and parts[-1].of("finish", "failed"))
    is_there = has_ended or (folder / SUMMARY).exists()
    summary = understood(SUMMARY, lambda: json_object(SUMMARY)) if is_there else None
    if summary is not None and parts and has_ended != (summary.get("exit") is not None):
        damage.append(f"{SUMMARY} and {STEPS} disagree on whether the run has ended")
    if summary is None or summary.get("exit") is None:  # a new start clears the exit code; or the file has proofs alone
        summary = {}
    return Evidence(folder=folder, config=config, parts=parts, held=_held(parts, summary), damage=damage)


def _row(line: int, text: bytes) -> Row:
    row = {**parse_json(text), "line": line}
    for name, kind in {"event": str, "step": int, "first_step": int, "samples": int, "exit": int}.items():
        if type(row.get(name, kind())) is not kind or not row["event"]:  # exactly: a bool is no number here
            raise ValueError(f"{name} is {row[name]!r}")
    return row


def _held(parts: Sequence[Part], summary: Mapping[str, Any]) -> dict[str, Check]:
    """Return the run's own checks, by name; and those that later commands have added to its summary."""
    held = {check.name: check for check in from_json(summary.get("proof"))}
    for part in parts:
        told = [row.get("checks") for row in part.of("proof")]
        # A start that made no step has only checks that it made.
        has_steps = part.last_step > part.first_step or part is parts[0]
        held |= {check.name: check for check in from_json(told[-1] if told else None) if has_steps or check.times}
    return held


def reason(error: Exception) -> str:
    """Return what an error found, without its advice, as a clause."""
    return str(error).partition(";")[0].rstrip(".")


def at(row: Row) -> str:
    """Return an event's place."""
    return f"{STEPS} line {row['line']}"
