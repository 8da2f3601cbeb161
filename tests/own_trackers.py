"""Trackers of the tests' own, which write what they get to `got.jsonl` in the run's folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.record.trackers import RunInfo


class Plain:
    """A tracker as a user writes it."""

    def start(self, run: RunInfo) -> str:
        self._path = Path(run.folder) / "got.jsonl"
        self._write("start", run.name, run.config, run.id)
        sys.excepthook = print  # as W&B and SwanLab do
        return run.id or f"id of {os.getpid()}"

    def log(self, values: dict[str, float], step: int) -> None:
        self._write("log", step, values)

    def finish(self, exit_code: int | None, files: list[Path]) -> None:
        self._write("finish", exit_code, {file.name: file.read_text() for file in files})

    def _write(self, *words: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(words) + "\n")


class Slow(Plain):
    """Takes a second for each call."""

    def log(self, values: dict[str, float], step: int) -> None:
        time.sleep(1)
        super().log(values, step)


class Down(Plain):
    """Fails in each call, with the address of a server."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise ConnectionError("no answer from https://me:secret@tracker.example/api")


class Silent(Plain):
    """Never comes to an end of its start, and asks on standard input."""

    def start(self, run: RunInfo) -> str:
        assert input() == "", "it was given something to read"
        raise AssertionError


class Hanging(Plain):
    """Hangs in its start."""

    def start(self, run: RunInfo) -> str:
        time.sleep(600)
        return ""


class Partial:
    """Lacks two methods."""

    def start(self, run: RunInfo) -> None: ...


def got(folder: Path) -> list[list[Any]]:
    """Return the calls that `Plain` has written in a run's folder."""
    return [json.loads(line) for line in (folder / "got.jsonl").read_text().splitlines()]
