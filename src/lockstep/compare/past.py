"""Runs that were made before, on this machine or others, as their own records tell."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.options import read_named
from ..errors import RequestError
from ..files import shown
from ..runs import folders
from . import records
from .records import Record, json_of

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

    @functools.cached_property
    def record(self) -> Record:
        """Its steps.jsonl. Raises `RequestError` where that is damaged."""
        return records.record(self.folder)

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
            folders.check_free(self.folder)
        except RequestError:
            return "running"
        except OSError:  # of somebody else's
            return "unfinished"
        return "killed"


def below(folder: Path) -> list[Run]:
    """Return the runs below `folder`, at most two levels deep, and whole trainings of comparisons; the newest last.

    A folder that is a run itself is the only one. Runs of a comparison's races are left out, which end in their midst.
    """
    if (folder / "manifest.json").exists():
        return [_listed(folder, folder.parent)]
    depths = ("*", "*/*", "*/seed-*/run", "*/*/seed-*/run")
    paths = {path.parent for depth in depths for path in folder.glob(f"{depth}/manifest.json")}
    found = [
        _listed(path, folder)
        for path in sorted(paths)
        if not (path.parent.name.startswith("race-") and (path.parents[1] / "plan.json").exists())
    ]
    return sorted(found, key=lambda run: str(run.manifest.get("date", "")))


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
    for name in ("summary.json", "config.toml", records.FILE):
        if not (folder / name).exists():
            page = folder / "report.html"
            what = f"a comparison, reported in {shown(page)}" if page.exists() else "no run that has ended"
            raise RequestError(f"{shown(folder)} is {what}: it has no {name}; give another folder.")
    return _read(folder, shown(folder))


def _read(folder: Path, name: str) -> Run:
    manifest, summary = (json_of(folder / file) for file in ("manifest.json", "summary.json"))
    return Run(name=name, folder=folder, options=read_named(folder / "config.toml"), manifest=manifest, summary=summary)


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return, for each run, the options that are not the same in all."""
    keys = {key: None for run in runs for key in run.options if key not in _BORING}
    vary = [key for key in keys if len({repr(run.options.get(key)) for run in runs}) > 1]
    return [{key: run.options[key] for key in vary if key in run.options} for run in runs]


def check_one_job(runs: Sequence[Run], *more: str) -> None:
    """Raise `RequestError` where the runs are not ways of one job, in which `more` options too are the same."""
    first, *others = runs
    for run in others:
        pairs = [(key, run.options.get(key), first.options.get(key)) for key in (*JOB, *more)]
        if differ := [f"{key} {mine!r} (not {its!r})" for key, mine, its in pairs if mine != its]:
            more_of = f" and {len(differ) - _TOLD} more" if len(differ) > _TOLD else ""
            raise RequestError(
                f"{run.name} is of another job than {first.name}: {', '.join(differ[:_TOLD])}{more_of}; "
                "compare runs of one job."
            )
