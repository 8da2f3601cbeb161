"""What a run's own steps.jsonl tells of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import foreign, lines_of, parse_json, read, understanding
from ..record.checks import SUMMARY, Check, from_json

FILE = "steps.jsonl"


def start(folder: Path) -> dict[str, Any]:
    """Return the first start event of a run."""
    with understanding(path := folder / FILE):
        return {**parse_json(next(lines_of(path), b"{}"))}


def step_s(folder: Path) -> list[float]:
    """Return the mean seconds of a step in each interval that a run has logged, but for the first."""
    with understanding(path := folder / FILE):
        rows = map(parse_json, lines_of(path))
        return [float(row["step_s"]) for row in rows if row["event"] == "log"][1:]


def curves(folder: Path, *, steps: int | None = None) -> tuple[list[float], list[tuple[float, float]]]:
    """Return a run's losses by step, and (seconds since its start, percent) of a processor, or of its GPUs.

    `steps` is how many of them are wanted, by default all.
    """
    losses: dict[int, float] = {}  # a run that was resumed may have made a step twice
    busy: list[tuple[float, float]] = []
    begun: float | None = None
    with understanding(path := folder / FILE):
        for line in lines_of(path):
            row = parse_json(line)
            if row["event"] == "step":
                losses[row["step"]] = math.nan if row["loss"] is None else float(row["loss"])
            elif row["event"] == "start" and begun is None:
                begun = float(row["time"])
            elif row["event"] == "log" and begun is not None:
                percent = row.get("device_percent", row.get("process_cpu_percent"))
                if percent is not None:
                    busy.append((float(row["time"]) - begun, float(percent)))
    return [loss for _, loss in sorted(losses.items())][:steps], busy


def proved(held: Any) -> str:
    """Return the names of the checks that hold, and of those that fail; `held` is "proof" of a summary.json."""
    judged = [each for each in from_json(held) if each.outcome in (Check.HOLDS, Check.FAILS)]
    return ", ".join(each.name + " fails" * each.fails for each in judged)


def training(path: Path, target: float | None) -> dict[str, Any]:
    """Return what a run's steps.jsonl tells of its training, up to the evaluation that reaches `target` if one does.

    step, train_s: how many steps, and their seconds. epoch_s: of each epoch. evals: [step, seconds until then,
    accuracy] of each evaluation. reached: whether the last one reaches the target. proved: as of the whole run. Of
    steps that a run made again, since it was killed and went on from a checkpoint, the last ones count. Raises
    `RequestError` where a file is damaged.
    """
    told: dict[str, Any] = {"step": 0, "train_s": 0.0, "epoch_s": [], "evals": [], "reached": False, "proved": ""}
    logged, is_part = [(0, 0.0)], False
    if (summary := path.parent / SUMMARY).exists():
        with understanding(summary):
            told["proved"] = proved(parse_json(read(summary)).get("proof"))
    with understanding(path):
        for row in map(parse_json, lines_of(path)):
            if row["event"] == "start":
                first = row.get("first_step", 0)
                logged = [each for each in logged if each[0] <= first]
                told["evals"] = [each for each in told["evals"] if each[0] <= first]
                told["epoch_s"], is_part = list(row.get("epoch_s", [])), bool(first % (row.get("steps_per_epoch") or 1))
                told["step"], told["train_s"] = logged[-1]
            elif row["event"] == "log":  # of the steps since the last one, by their mean
                told["train_s"] += row["step_s"] * (row["step"] - told["step"])
                told["step"] = row["step"]
                logged.append((told["step"], told["train_s"]))
            elif row["event"] == "epoch":
                told["epoch_s"] += [] if is_part else [row["epoch_s"]]
                is_part = False
            elif row["event"] == "eval" and row.get("top1") is not None:
                told["evals"].append([row["step"], told["train_s"], row["top1"]])
                if target is not None and row["top1"] >= target:
                    return told | {"reached": True}
    return told


def reaching(path: Path, target: float) -> Callable[[], bool]:
    """Return what follows the records, and tells whether an evaluation reaches the target with steps left."""
    read_to, total = 0, 0

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
