"""Faults in real runs: ranks that are killed, stopped or that exit, at any moment, and what comes of the run.

The runs read a data set of ours that takes its time, so that a fault can come in the middle of anything: a step, a
save, an evaluation.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

LIMIT_S = 120.0
"""After which a run counts as hanging."""
_LOOK_S = 0.002
_LEAVE_S = 1.0
_MARK = "FAULTS_RUN"
"""The environment variable that all which a run starts has from it, wherever it works and whoever is its parent."""
EVERY = 5
"""Steps between checkpoints."""
_SAMPLE_S = 0.003
Pair = tuple[torch.Tensor, int]


class Slow(Dataset[Pair]):
    """Samples of 8 numbers, each after a pause."""

    classes = 4

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        time.sleep(_SAMPLE_S)
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


def slow() -> tuple[Slow, Slow]:
    """Return training and test set; from now on a file `exit_RANK` in the working folder ends that rank."""
    threading.Thread(target=_exit_when_told, daemon=True).start()
    return Slow(240), Slow(40)


def _exit_when_told() -> None:
    told = Path(f"exit_{os.environ.get('RANK', '0')}")
    while True:
        if told.exists():
            told.unlink()
            os._exit(3)
        time.sleep(_LOOK_S)


RUN = [
    "train",
    *("--data", "benchmarks.faults:slow"),
    *("--model", "mlp"),
    *("--strategy", "ddp"),
    *("--accelerator", "cpu"),
    *("--workers", "0"),
    *("--batch", "24"),
    *("--epochs", "8"),
    *("--checkpoint-every", f"{EVERY}"),
    *("--log-every", "1"),
    *("--output", "run"),
]


@dataclass
class Run:
    """A run under way, in a folder of its own."""

    process: subprocess.Popen[str]
    folder: Path
    begun_s: float
    known_by: str
    """What the command line of a rank has in it, of the command's children."""

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, in their order."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if self.known_by in " ".join(each.cmdline()):
                        found.append(each)
        return sorted(found, key=lambda each: each.pid)

    def left(self) -> list[psutil.Process]:
        """Return the processes that the run has started and that are still there a moment after its end."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if each.environ().get(_MARK) == str(self.folder) and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        _, alive = psutil.wait_procs(found, _LEAVE_S)
        return list(alive)

    def until(self, holds: Callable[[], bool]) -> None:
        """Return once something holds, or the run is over."""
        while not holds() and self.process.poll() is None:
            if time.perf_counter() - self.begun_s > LIMIT_S:
                raise RuntimeError("the run goes on and on")
            time.sleep(_LOOK_S)

    def until_ranks(self, count: int) -> list[psutil.Process]:
        """Return the processes of its ranks, once there are so many."""
        self.until(lambda: len(self.ranks) == count)
        return self.ranks

    def evaluations(self) -> int:
        """Return how many evaluations have begun."""
        return len(self._rows("evaluate"))

    def begun_at(self) -> list[int]:
        """Return the step after which each start went on."""
        return [row["first_step"] for row in self._rows("start")]

    def steps(self, *, start: int = 1) -> list[int]:
        """Return the steps that have been recorded from this start of the ranks on."""
        rows = self._rows()
        begun = [index for index, row in enumerate(rows) if row["event"] == "start"]
        return (
            [row["step"] for row in rows[begun[start - 1] :] if row["event"] == "step"] if len(begun) >= start else []
        )

    def _rows(self, event: str = "") -> list[dict[str, Any]]:
        path = self.folder / "run" / "steps.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if event in ("", row["event"])]

    def starts(self) -> int:
        """Return how often ranks have begun to train."""
        return len(self._rows("start"))

    def until_step(self, step: int, *, start: int = 1) -> float:
        """Return the time, by `time.perf_counter`, at which the run has made that step in that start of its ranks."""
        while not ((made := self.steps(start=start)) and made[-1] >= step):
            if time.perf_counter() - self.begun_s > LIMIT_S or self.process.poll() is not None:
                raise RuntimeError(f"no step {step}: {self.process.poll()}")
            time.sleep(_LOOK_S)
        return time.perf_counter()

    def weights(self) -> dict[str, bytes]:
        """Return the last checkpoint's files of tensors."""
        last = self.folder / "run" / "checkpoints" / "last"
        return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def running(folder: Path, *words: object) -> contextlib.AbstractContextManager[Run]:
    """Start `lockstep train` with these words; at the end it and all its ranks are gone."""
    return started(folder, ["-m", "lockstep", *RUN, *map(str, words)], known_by="spawn_main")


@contextlib.contextmanager
def started(
    folder: Path, command: Sequence[str], *, known_by: str, python: str = sys.executable, **env: str
) -> Iterator[Run]:
    """Start Python with these words and variables; at the end it and all its ranks are gone."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        [python, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", _MARK: str(folder), **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Run(process, folder, begun_s, known_by)
    try:
        yield run
    finally:
        left = [] if process.poll() is not None else run.ranks
        process.kill()
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
