"""Rows of runs that are finished, this machine's or others': what their own records tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..files import lines_of, parse_json, read, shown, understanding
from ..options import read_named
from .numbers import Interval, spread
from .rows import Row

JOB = ("model", "data", "step", "batch", "augment", "image-size", "samples", "holdout", "classes")
"""The options that make runs ways of one job."""
_BORING = ("output", "resume", "quiet", "log-every", "timeout", "stall-timeout")


@dataclass
class Run:
    """A run's folder, as its records tell."""

    name: str
    summary: Mapping[str, Any]
    options: Mapping[str, Any]
    start: Mapping[str, Any]
    losses: list[float] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)


def load(folder: Path) -> Run:
    """Return what a run has recorded. Raises `RequestError` where `folder` is no run that has ended, or is damaged."""
    summary, config, steps = (folder / name for name in ("summary.json", "config.toml", "steps.jsonl"))
    if not folder.is_dir():
        raise RequestError(f"{shown(folder)} is not there; give the folder of a run that has ended.")
    for path in (summary, config, steps):
        if not path.exists():
            raise RequestError(f"{shown(folder)} is no run that has ended: it has no {path.name}; give another folder.")
    with understanding(summary):
        told = parse_json(read(summary))
        found = Run(shown(folder), {**told}, read_named(config), {})
    found.losses, found.busy = curves(folder)
    with understanding(steps):
        found.start = parse_json(next(lines_of(steps), b"{}"))
    return found


def curves(folder: Path, *, steps: int | None = None) -> tuple[list[float], list[tuple[float, float]]]:
    """Return a run's losses by step, and (seconds since its start, percent) of a processor, or of its GPUs.

    `steps` is how many of them are wanted, by default all.
    """
    losses: list[float] = []
    busy: list[tuple[float, float]] = []
    begun: float | None = None
    with understanding(path := folder / "steps.jsonl"):
        for line in lines_of(path):
            row = parse_json(line)
            if row["event"] == "step":
                losses.append(math.nan if row["loss"] is None else float(row["loss"]))
            elif row["event"] == "start" and begun is None:
                begun = float(row["time"])
            elif row["event"] == "log" and begun is not None:
                percent = row.get("device_percent", row.get("process_cpu_percent"))
                if percent is not None:
                    busy.append((float(row["time"]) - begun, float(percent)))
    return losses[:steps], busy


def check_one_job(runs: Sequence[Run]) -> None:
    """Raise `RequestError` where the runs are not ways of one job."""
    first, *others = runs
    for run in others:
        differ = [
            f"{key} {run.options.get(key)!r} (not {first.options.get(key)!r})"
            for key in JOB
            if run.options.get(key) != first.options.get(key)
        ]
        if differ:
            raise RequestError(
                f"{run.name} is of another job than {first.name}: {', '.join(differ)}; compare runs of one job."
            )


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each run; speeds have no interval, since each was measured once."""
    found = [_row(run, _flags(run, runs)) for run in runs]
    rates = [row.samples_per_s.middle for row in found if row.samples_per_s is not None]
    alone = [row for row in found if row.devices == 1 and row.samples_per_s is not None]
    base = alone[0].samples_per_s.middle if alone and alone[0].samples_per_s else next(iter(rates), None)
    return [_against(row, base) for row in found]


def _against(row: Row, base: float | None) -> Row:
    if row.samples_per_s is None or not base:
        return row
    ratio = row.samples_per_s.middle / base
    return replace(row, ratio=Interval(ratio, 0.0, math.inf))


def _row(run: Run, flags: tuple[str, ...]) -> Row:
    summary, plan = run.summary, run.start.get("plan") or {}
    rate = summary.get("samples_per_s") or summary.get("images_per_s")
    memory = summary.get("peak_memory_bytes") or {}
    epochs = [float(each) for each in summary.get("epoch_s") or []]
    chosen = run.start.get("chosen") or {}
    return Row(
        name=run.name,
        flags=flags,
        devices=int(chosen.get("devices") or plan.get("ranks") or 1),
        ranks=int(plan.get("ranks") or 1),
        batch=plan.get("global_size"),
        samples_per_s=None if not rate else Interval(float(rate), 0.0, math.inf),
        failed="" if rate else f"ended with exit code {summary.get('exit')}, and no speed was recorded",
        step_p50_s=summary.get("step_p50_s"),
        step_p95_s=summary.get("step_p95_s"),
        epoch_s=sum(epochs) / len(epochs) if epochs else None,
        host_memory_bytes=memory.get("host"),
        device_memory_bytes=memory.get("device"),
        accuracy=None if (top1 := summary.get("top1")) is None else spread([float(top1)]),
    )


def _flags(run: Run, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return, as flags, the options in which a run is not the first."""
    first = runs[0].options
    differ = [key for key, value in run.options.items() if key not in _BORING and value != first.get(key)]
    return tuple(word for key in differ for word in (f"--{key}", str(run.options[key])))
