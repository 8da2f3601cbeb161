"""What a run's folder tells: its steps.jsonl, read once, and its summary.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import foreign, lines_of, parse_json, read, understanding
from ..record.checks import SUMMARY, Check, from_json

FILE = "steps.jsonl"


@dataclass
class Record:
    """A run's steps.jsonl: of steps that were made again, after a resume, the last ones count."""

    start: dict[str, Any] = field(default_factory=dict)
    """The first start event."""
    losses: dict[int, float] = field(default_factory=dict)
    """By step; NaN for what was no finite number."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the start, percent of a processor, or of the GPUs), of rank 0."""
    step_s: list[float] = field(default_factory=list)
    """The mean step of each interval that was logged."""
    step: int = 0
    train_s: float = 0.0
    """Seconds of its steps."""
    epoch_s: list[float] = field(default_factory=list)
    """Of each whole epoch."""
    evals: list[list[Any]] = field(default_factory=list)
    """[step, seconds of training until then, accuracy] of each evaluation."""
    reached: bool = False
    """Whether the last evaluation reaches the accuracy up to which the record was read."""


def record(folder: Path, until: float | None = None) -> Record:
    """Return what a run's steps.jsonl tells, up to the evaluation whose accuracy reaches `until`.

    Raises `RequestError` where the file is damaged.
    """
    found, logged, is_part = Record(), [(0, 0.0)], False
    with understanding(path := folder / FILE):
        for row in map(parse_json, lines_of(path)):
            event = row["event"]
            if event == "start":
                found.start = found.start or {**row}
                first = row.get("first_step", 0)
                logged = [each for each in logged if each[0] <= first]
                found.step, found.train_s = logged[-1]
                found.evals = [each for each in found.evals if each[0] <= first]
                found.epoch_s, is_part = list(row.get("epoch_s", [])), bool(first % (row.get("steps_per_epoch") or 1))
            elif event == "step":
                found.losses[row["step"]] = math.nan if row["loss"] is None else float(row["loss"])
            elif event == "log":
                found.step_s.append(float(row["step_s"]))
                found.train_s += row["step_s"] * (row["step"] - found.step)
                found.step = row["step"]
                logged.append((found.step, found.train_s))
                percent = row.get("device_percent", row.get("process_cpu_percent"))
                if percent is not None:
                    found.busy.append((float(row["time"]) - float(found.start["time"]), float(percent)))
            elif event == "epoch":
                found.epoch_s += [] if is_part else [row["epoch_s"]]
                is_part = False
            elif event == "eval" and row.get("top1") is not None:
                found.evals.append([row["step"], found.train_s, row["top1"]])
                if until is not None and row["top1"] >= until:
                    found.reached = True
                    break
    return found


def training(folder: Path, target: float | None) -> dict[str, Any]:
    """Return what is kept of a whole training, up to the evaluation that reaches `target`."""
    found = record(folder, target)
    kept = {key: getattr(found, key) for key in ("step", "train_s", "epoch_s", "evals", "reached")}
    return kept | {"proved": proved(json_of(folder / SUMMARY).get("proof"))}


def json_of(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; nothing where there is none. Raises `RequestError` where it is damaged."""
    if not path.exists():
        return {}
    with understanding(path):
        return {**parse_json(read(path))}


def proved(proof: Any) -> str:
    """Return the names of the checks that hold, and of those that fail; `proof` is as in a summary.json."""
    judged = [each for each in from_json(proof) if each.outcome in (Check.HOLDS, Check.FAILS)]
    return ", ".join(each.name + " fails" * each.fails for each in judged)


def reaching(folder: Path, target: float) -> Callable[[], bool]:
    """Return a function that follows a run's records: whether an evaluation reaches the target with steps left."""
    path, read_to, total = folder / FILE, 0, 0

    def look() -> bool:
        nonlocal read_to, total
        if not path.exists():
            return False
        with open(path, "rb", opener=foreign) as file:
            file.seek(read_to)
            lines = [each for each in file if each.endswith(b"\n")]  # the last one may still be written
        read_to += sum(map(len, lines))
        for row in (parse_json(each) for each in lines if each.startswith((b'{"event": "start"', b'{"event": "eval"'))):
            total = row.get("total_steps", total)
            # One that has made its last step ends by itself.
            if row["event"] == "eval" and (row.get("top1") or 0.0) >= target and row["step"] < total:
                return True
        return False

    return look
