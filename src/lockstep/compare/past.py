"""Runs that were made before, on this machine or others, as their own records tell: a list, and rows of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import locks
from ..errors import RequestError
from ..files import parse_json, read, shown, understanding
from ..options import read_named
from . import records
from .numbers import Interval, spread
from .rows import Row

JOB = ("model", "data", "step", "augment", "image-size", "samples", "holdout", "classes")
"""The options that make runs ways of one job."""
_TOLD = 3
"""Options in which jobs differ, that a refusal names."""
_BORING = ("output", "resume", "quiet", "log-every", "timeout", "stall-timeout", "init-method", "launcher", "data-dir")
_STATES = {0: "done", 1: "failed", 2: "refused", 3: "proof failed", 75: "stopped"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's folder, as its records tell; what they do not is empty."""

    name: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    """Why its records cannot be read."""

    @property
    def samples_per_s(self) -> float | None:
        """Over all its steps; older runs have counted images."""
        rate = self.summary.get("samples_per_s") or self.summary.get("images_per_s")
        return None if rate is None else float(rate)

    @property
    def state(self) -> str:
        """How it stands: a summary without an exit code is that of a run that goes on, or was killed."""
        code = self.summary.get("exit")
        if self.trouble:
            return "?"
        if code is not None:
            return _STATES.get(code, f"exit {code}")
        try:
            locks.check_free(self.folder)
        except RequestError:
            return "running"
        except OSError:  # of somebody else's
            return "unfinished"
        return "killed"


def below(folder: Path) -> list[Run]:
    """Return the runs below `folder`, at most two levels deep, and whole trainings of comparisons; the newest last.

    A folder that is a run itself is the only one.
    """
    if (folder / "manifest.json").exists():
        return [_listed(folder, folder.parent)]
    whole = ("*/seed-*/run", "*/*/seed-*/run")
    paths = {path.parent for depth in ("*", "*/*", *whole) for path in folder.glob(f"{depth}/manifest.json")}
    found = sorted(path for path in paths if not _is_of_race(path))
    return sorted((_listed(each, folder) for each in found), key=lambda run: str(run.manifest.get("date", "")))


def _is_of_race(folder: Path) -> bool:
    """Whether a comparison has made the run to race it: it is ended in its midst."""
    return folder.parent.name.startswith("race-") and (folder.parents[1] / "plan.json").exists()


def _listed(folder: Path, above: Path) -> Run:
    name = str(folder.relative_to(above))
    try:
        return _read(folder, name)
    except RequestError as error:
        return Run(name=name, folder=folder, trouble=str(error))


def load(folder: Path) -> Run:
    """Return what a run has recorded. Raises `RequestError` where `folder` is no run that has ended, or is damaged."""
    if not folder.is_dir():
        raise RequestError(f"{shown(folder)} is not there; give the folder of a run that has ended.")
    for name in ("summary.json", "config.toml", "steps.jsonl"):
        if not (folder / name).exists():
            page = folder / "report.html"
            what = f"a comparison, reported in {shown(page)}" if page.exists() else "no run that has ended"
            raise RequestError(f"{shown(folder)} is {what}: it has no {name}; give another folder.")
    return _read(folder, shown(folder))


def _read(folder: Path, name: str) -> Run:
    manifest, summary = (_json(folder / file) for file in ("manifest.json", "summary.json"))
    return Run(name=name, folder=folder, options=read_named(folder / "config.toml"), manifest=manifest, summary=summary)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with understanding(path):
        return {**parse_json(read(path))}


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return, for each run, the options that are not the same in all of its job; of several jobs, theirs first."""
    by_job: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        by_job.setdefault(job(run), []).append(run)
    vary = {
        of: [*_varied(runs, JOB), *_varied(mates, {key for each in mates for key in each.options} - {*JOB})]
        for of, mates in by_job.items()
    }
    return [
        {key: run.options[key] for key in vary[job(run)] if run.options.get(key) not in (None, "", [])} for run in runs
    ]


def _varied(runs: Sequence[Run], keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if key not in _BORING and len({repr(run.options.get(key)) for run in runs}) > 1)


def job(run: Run) -> tuple[str, ...]:
    """Return what makes runs ways of one job."""
    return tuple(repr(run.options.get(key)) for key in JOB)


def check_one_job(runs: Sequence[Run], *more: str) -> None:
    """Raise `RequestError` where the runs are not ways of one job, in which `more` options too are the same."""
    first, *others = runs
    for run in others:
        differ = [
            f"{key} {run.options.get(key)!r} (not {first.options.get(key)!r})"
            for key in (*JOB, *more)
            if run.options.get(key) != first.options.get(key)
        ]
        if differ:
            more_of = f" and {len(differ) - _TOLD} more" if len(differ) > _TOLD else ""
            raise RequestError(
                f"{run.name} is of another job than {first.name}: {', '.join(differ[:_TOLD])}{more_of}; "
                "compare runs of one job."
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
    summary, began, rate = run.summary, records.start(run.folder), run.samples_per_s
    plan, chosen = began.get("plan") or {}, began.get("chosen") or {}
    memory = summary.get("peak_memory_bytes") or {}
    epochs = [float(each) for each in summary.get("epoch_s") or []]
    return Row(
        name=run.name,
        flags=flags,
        devices=int(chosen.get("devices") or plan.get("ranks") or 1),
        ranks=int(plan.get("ranks") or 1),
        batch=plan.get("global_size"),
        samples_per_s=None if not rate else Interval(rate, 0.0, math.inf),
        failed="" if rate else f"ended with exit code {summary.get('exit')}, and no speed was recorded",
        step_p50_s=summary.get("step_p50_s"),
        step_p95_s=summary.get("step_p95_s"),
        epoch_s=sum(epochs) / len(epochs) if epochs else None,
        host_memory_bytes=memory.get("host"),
        device_memory_bytes=memory.get("device") or None,
        proved=records.proved(summary.get("proof")),
        accuracy=None if (top1 := summary.get("top1")) is None else spread([float(top1)]),
    )


def _flags(run: Run, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return, as flags, the options in which a run is not the first."""
    first = runs[0].options
    differ = [key for key, value in run.options.items() if key not in _BORING and value != first.get(key)]
    return tuple(word for key in differ for word in (f"--{key}", str(run.options[key])))
