"""Experiment trackers: `--track wandb`, or a class with the methods of `Tracker` as `--track module:name`.

Projects, servers and keys are in the environment, as each library documents: WANDB_PROJECT, MLFLOW_TRACKING_URI, …
"""

from __future__ import annotations

import csv
import glob
import importlib.util
import io
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import user_code
from ..config.registry import TRACKERS
from ..errors import RequestError, Stopped
from ..files import lines_of, parse_json, write_whole


@dataclass(frozen=True)
class RunInfo:
    """A run, for its trackers."""

    name: str  # of its folder
    folder: str
    config: dict[str, Any]  # {option: value}, with the choices of `auto`
    id: str  # what `Tracker.start` returned to the run's first start; "" for a new run


class Tracker(Protocol):
    """One run in an experiment tracker. Rank 0 has it, in a process of its own (see `tracking`)."""

    def start(self, run: RunInfo) -> str | None:
        """Begin a run, or continue the run with `run.id`. Return its id."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Add values, such as {"train/loss": 2.3}, at optimizer step `step`."""

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        """End the run; attach its files, such as proof.md. `exit_code` is None if unknown."""


class Wandb:
    """A run of Weights & Biases."""

    def start(self, run: RunInfo) -> str:
        import wandb

        self._run = wandb.init(id=run.id or None, resume="allow", name=run.name, config=run.config)
        self._run.define_metric("*", step_metric="step")  # W&B's own drops the steps that a resumed run repeats
        return str(self._run.id)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values | {"step": step})

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        for file in files:
            self._run.save(glob.escape(str(file)), base_path=str(file.parent), policy="now")
        self._run.finish(exit_code=1 if exit_code is None else exit_code)


class MLflow:
    """A run of MLflow."""

    def start(self, run: RunInfo) -> str:
        import mlflow

        self._mlflow = mlflow
        active = mlflow.start_run(run_id=run.id or None, run_name=run.name)
        if not run.id:  # MLflow refuses other values of parameters
            mlflow.log_params(run.config)
        return str(active.info.run_id)

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        for file in files:
            self._mlflow.log_artifact(str(file))
        self._mlflow.end_run({0: "FINISHED", None: "KILLED", Stopped.exit_code: "KILLED"}.get(exit_code, "FAILED"))


class Trackio:
    """A run of Trackio, in the project `lockstep`. Its name is its id."""

    def start(self, run: RunInfo) -> str:
        import trackio

        self._trackio = trackio
        name = run.id or f"{run.name}-{secrets.token_hex(3)}"
        trackio.init(project="lockstep", name=name, resume="allow", config=run.config, embed=False)
        return name

    def log(self, values: dict[str, float], step: int) -> None:
        self._trackio.log(values, step=step)

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        pages = {file.name: self._trackio.Markdown(file.read_text()) for file in files if file.suffix == ".md"}
        self._trackio.log(pages | {"exit": exit_code})
        self._trackio.finish()


class SwanLab:
    """An experiment of SwanLab."""

    def start(self, run: RunInfo) -> str:
        import swanlab

        self._run = swanlab.init(id=run.id or None, resume="allow", name=run.name, config=run.config)
        return str(self._run.id)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        for file in files:
            self._run.save(glob.escape(str(file)), base_path=str(file.parent), policy="now")
        state = {0: "success", None: "aborted", Stopped.exit_code: "aborted"}.get(exit_code, "crashed")
        self._run.finish(state, error=None if state == "success" else f"exit code {exit_code}")


class Csv:
    """`steps.csv` and `evals.csv` in the run's folder, from its `steps.jsonl`."""

    def start(self, run: RunInfo) -> None:
        self._folder, self._due_s = Path(run.folder), 0.0

    def log(self, values: dict[str, float], step: int) -> None:
        begun_s = time.monotonic()
        if begun_s > self._due_s:
            self.finish(None, [])
            self._due_s = begun_s + 50 * (time.monotonic() - begun_s)  # at most 2 % of a processor

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        for event in ("step", "eval"):
            text, names = io.StringIO(), dict.fromkeys(name for row in self._rows(event) for name in row)
            writer = csv.DictWriter(text, list(names), extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows(event))  # perhaps more rows than before
            write_whole(self._folder / f"{event}s.csv", text.getvalue().encode())

    def _rows(self, event: str) -> Iterator[dict[str, Any]]:
        for line in lines_of(self._folder / "steps.jsonl"):
            row = parse_json(line) if line.endswith(b"\n") else {}
            if row.pop("event", "") == event:
                yield row


_KIND: dict[str, type[Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
    "csv": Csv,
}


def check(names: Collection[str]) -> None:
    """Raise `RequestError` for a tracker whose library is not installed, or a class without the three methods."""
    for name in names:
        if ":" in name:
            kind = user_code.load("--track", name)
            missing = [method for method in ("start", "log", "finish") if not callable(getattr(kind, method, None))]
            if missing:
                raise RequestError(
                    f"--track {name} has no {' and no '.join(missing)}: a tracker is a class with the methods start, "
                    "log and finish."
                )
        elif name in TRACKERS:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:  # a folder of that name, such as W&B's own records
                raise RequestError(
                    f"--track {name} needs {name}, which is not installed: pip install {TRACKERS[name]}."
                )


def make(name: str) -> Tracker:
    """Return the tracker `name`, a library's or the user's."""
    tracker: Tracker = (_KIND.get(name) or user_code.load("--track", name))()
    return tracker
