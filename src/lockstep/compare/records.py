"""Read a run's folder: steps.jsonl, summary, manifest and options."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.options import read_named
from ..errors import RequestError
from ..files import lines_of, parse_json, read, shown, understanding, unlinked
from ..record.checks import SHEET, SUMMARY, Check, from_json
from ..runs import folders

FILE = "steps.jsonl"
STEP, SECONDS, ACCURACY = range(3)  # of an evaluation: its step, the seconds of training until then, and its accuracy
JOB = ("model", "data", "step", "augment", "image-size", "samples", "holdout", "classes")
"""The options that identify a job."""
_BORING = (
    *("output", "resume", "quiet", "track", "log-every", "timeout", "stall-timeout", "init-method", "launcher"),
    "data-dir",
)
_FLOATS = ("top1", "samples_per_s", "images_per_s", "step_p50_s", "step_p95_s")  # of a summary.json
_STATES = {0: "done", 1: "failed", 2: "refused", 3: "proof failed", 75: "stopped"}


@dataclass
class Record:
    """A run's steps.jsonl; of steps repeated after a resume, the last count."""

    start: dict[str, Any] = field(default_factory=dict)  # the first start event
    losses: dict[int, float] = field(default_factory=dict)  # by step; NaN if not finite
    step_s: list[float] = field(default_factory=list)  # the mean step of each logged interval
    step: int = 0
    train_s: float = 0.0  # seconds of its steps
    epoch_s: list[float] = field(default_factory=list)  # of each whole epoch
    evals: list[list[Any]] = field(default_factory=list)  # as `STEP`, `SECONDS` and `ACCURACY` say
    reached: bool = False  # whether the last evaluation reaches the target accuracy

    @property
    def plan(self) -> dict[str, Any]:
        """The batch plan; empty for a loop without a loader."""
        return self.start.get("plan") or {}

    @property
    def chosen(self) -> dict[str, Any]:
        """The run's chosen options, such as its devices."""
        return self.start.get("chosen") or {}

    @property
    def devices(self) -> int:
        """The number of devices of the run."""
        return int(self.chosen.get("devices") or self.plan.get("ranks") or 1)


def record(folder: Path, until: float | None = None) -> Record:
    """Read a run's steps.jsonl, up to an evaluation that reaches the accuracy `until`.

    Raises `RequestError` if the file is damaged.
    """
    history, logged, is_part = Record(), [(0, 0.0)], False
    with understanding(path := folder / FILE):
        for row in map(parse_json, lines_of(path)):
            event = row["event"]
            if event == "start":
                history.start = history.start or {**row}
                first = row.get("first_step", 0)
                logged = [(step, train_s) for step, train_s in logged if step <= first]
                history.step, history.train_s = logged[-1]
                history.evals = [scores for scores in history.evals if scores[STEP] <= first]
                history.epoch_s, is_part = list(row.get("epoch_s", [])), bool(first % (row.get("steps_per_epoch") or 1))
            elif event == "step":
                history.losses[int(row["step"])] = math.nan if row["loss"] is None else float(row["loss"])
            elif event == "log":
                history.step_s.append(float(row["step_s"]))
                history.train_s += row["step_s"] * (row["step"] - history.step)
                history.step = row["step"]
                logged.append((history.step, history.train_s))
            elif event == "epoch":
                history.epoch_s += [] if is_part else [row["epoch_s"]]
                is_part = False
            elif event == "eval" and row.get("top1") is not None:
                history.evals.append([row["step"], history.train_s, row["top1"]])
                if until is not None and row["top1"] >= until:
                    history.reached = True
                    break
    return history


def training(folder: Path, target: float | None) -> dict[str, Any]:
    """Return the result of a whole training, up to the `target` accuracy."""
    history = record(folder, target)
    fields = {key: getattr(history, key) for key in ("step", "train_s", "epoch_s", "evals", "reached")}
    return fields | {"proved": proved(json_of(folder / SUMMARY).get("proof"))}


def json_of(path: Path) -> dict[str, Any]:
    """Return the object in a file, empty without a file. Raises `RequestError` for invalid JSON."""
    if not path.exists():
        return {}
    with understanding(path):
        return {**parse_json(read(path))}


def proved(proof: Any) -> str:
    """Name the checks that hold or fail, by "proof" of a summary.json."""
    judged = [check for check in from_json(proof) if check.outcome in (Check.HOLDS, Check.FAILS)]
    return ", ".join(check.name + " fails" * check.fails for check in judged)


def reaching(folder: Path, target: float) -> Callable[[], bool]:
    """Return a function that says whether an evaluation since its last call reaches the target."""
    path, read_to = folder / FILE, 0

    def look() -> bool:
        nonlocal read_to
        if not path.exists():
            return False
        with open(path, "rb", opener=unlinked) as file:
            file.seek(read_to)
            lines = [line for line in file if line.endswith(b"\n")]  # the last one may still be written
        read_to += sum(map(len, lines))
        evals = [row for row in map(parse_json, lines) if row["event"] == "eval"]
        return any((row.get("top1") or 0.0) >= target for row in evals)

    return look


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's folder, as read from its files."""

    name: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""  # why they cannot be read

    @functools.cached_property
    def record(self) -> Record:
        """The content of its steps.jsonl. Raises `RequestError` if it is damaged."""
        return record(self.folder)

    @property
    def samples_per_s(self) -> float | None:
        """Speed over all steps; older runs counted images."""
        rate: float | None = self.summary.get("samples_per_s") or self.summary.get("images_per_s")
        return rate

    @property
    def state(self) -> str:
        """Done, failed, stopped, running, killed, …"""
        code = self.summary.get("exit")
        if self.trouble:
            return "?"
        if code is not None:
            return _STATES.get(code, f"exit {code}")
        try:
            folders.check_free(self.folder)
        except RequestError:
            return "running"
        except OSError:  # another user's
            return "unfinished"
        return "killed"


def below(folder: Path) -> list[Run]:
    """List the runs below `folder`, the newest last.

    They are at most two levels deep, or whole trainings of comparisons. If `folder` is a run, it is the only one.
    Excludes the runs of races, which end midway, and of proofs.
    """
    if (folder / "manifest.json").exists():
        return [_listed(folder, folder.parent)]
    depths = ("*", "*/*", "*/seed-*/run", "*/*/seed-*/run")
    paths = {path.parent for depth in depths for path in folder.glob(f"{depth}/manifest.json")}
    runs = [_listed(path, folder) for path in sorted(paths) if not _is_part(path, folder)]
    return sorted(runs, key=lambda run: str(run.manifest.get("date", "")))


def _is_part(run: Path, folder: Path) -> bool:
    above = run.parent
    is_proved = above != folder and (above / SHEET).exists() and not (above / "manifest.json").exists()
    return is_proved or (above.name.startswith("race-") and (above.parent / "plan.json").exists())


def _listed(folder: Path, above: Path) -> Run:
    name = str(folder.relative_to(above))
    try:
        return _read(folder, name)
    except RequestError as error:
        return Run(name=name, folder=folder, trouble=str(error))


def load(folder: Path) -> Run:
    """Return a run that has ended. Raises `RequestError` for anything else."""
    if not folder.is_dir():
        raise RequestError(f"{shown(folder)} is not there; give the folder of a run that has ended.")
    for name in (SUMMARY, "config.toml", FILE):
        if not (folder / name).exists():
            page = folder / "report.html"
            description = f"a comparison, reported in {shown(page)}" if page.exists() else "no run that has ended"
            raise RequestError(f"{shown(folder)} is {description}: it has no {name}; give another folder.")
    return _read(folder, shown(folder))


def _read(folder: Path, name: str) -> Run:
    manifest, summary = (json_of(folder / file) for file in ("manifest.json", SUMMARY))
    with understanding(folder / SUMMARY):
        summary |= {key: float(summary[key]) for key in _FLOATS if summary.get(key) is not None}
        summary |= {"exit": int(summary["exit"])} if summary.get("exit") is not None else {}
    return Run(name=name, folder=folder, options=read_named(folder / "config.toml"), manifest=manifest, summary=summary)


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return each run's options that vary within its job. With several jobs, model and data come first."""
    options = []
    for run in runs:
        alike = [other for other in runs if job(other) == job(run)]
        keys = [*_varied(runs, ("model", "data")), *_varied(alike, (key for other in alike for key in other.options))]
        options.append({key: run.options[key] for key in keys if run.options.get(key) not in (None, "", [])})
    return options


def _varied(runs: Sequence[Run], keys: Iterable[str]) -> list[str]:
    candidates = [key for key in dict.fromkeys(keys) if key not in _BORING]
    return [key for key in candidates if len({repr(run.options.get(key)) for run in runs}) > 1]


def job(run: Run) -> tuple[str, ...]:
    """Return the options that identify a run's job."""
    return tuple(repr(run.options.get(key)) for key in JOB)


def check_one_job(runs: Sequence[Run], *keys: str) -> None:
    """Raise `RequestError` for runs that differ in the options `JOB` or `keys`."""
    first = runs[0]
    for run in runs[1:]:
        for key in (*JOB, *keys):
            if (value := run.options.get(key)) != (expected := first.options.get(key)):
                differ = f"{key} {value!r} (not {expected!r})"
                raise RequestError(
                    f"{run.name} is of another job than {first.name}: {differ}; compare runs of one job."
                )
