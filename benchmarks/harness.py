"""Taking turns, summing up, writing down."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from lockstep import hardware
from lockstep.versions import version_of

RESULTS = Path(__file__).parent / "results"
DISTURBED = 0.1
"""Share of the processors that other programs may use before a result says that it is not to be trusted."""


class Skipped(Exception):
    """Says why a benchmark cannot be run here."""


@dataclass(frozen=True)
class Series:
    """One number a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.values)

    def sure(self) -> tuple[float, float]:
        """Return bounds between which the median of ever more rounds lies with 95 % confidence, by their order."""
        count, half = len(self.values), 0.98 * math.sqrt(len(self.values))
        ordered = sorted(self.values)
        return ordered[max(0, math.floor(count / 2 - half))], ordered[min(count - 1, math.ceil(count / 2 + half))]

    def text(self, form: str = ".2f") -> str:
        """Return `median (least–most)`."""
        return f"{self.median:{form}} ({min(self.values):{form}}–{max(self.values):{form}})"

    def per(self, other: Series) -> Series:
        """Return the quotients, round by round: what slows a whole round down cancels."""
        return Series(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def minus(self, other: Series) -> Series:
        """Return the differences, round by round."""
        return Series(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))


def interleave(subjects: Mapping[str, Callable[[], float]], *, rounds: int, warm_up: int = 1) -> dict[str, Series]:
    """Call each subject in turn, A B C A B C …, and return what each measured by round; warm-up rounds are dropped."""
    values: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(warm_up + rounds):
        for name, measure in subjects.items():
            values[name].append(measure())
    return {name: Series(tuple(all_[warm_up:])) for name, all_ in values.items()}


class Apart:
    """A subject in a process of its own: what it leaves in memory and caches does not slow the next one down.

    `make(*given)`, a function of a module, is called there and returns what measures; calling this object has it
    measure once. Use it in a `with` block, which ends the process.
    """

    def __init__(self, make: Callable[..., Callable[[], float]], *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_measure_when_asked, args=(theirs, make, given), daemon=False)
        self._process.start()
        theirs.close()

    def __call__(self) -> float:
        """Return what the subject measured."""
        self._pipe.send(True)
        return float(self._pipe.recv())

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        self._process.join()


def _measure_when_asked(pipe: Connection, make: Callable[..., Callable[[], float]], given: tuple[Any, ...]) -> None:
    subject = make(*given)
    while True:
        try:
            pipe.recv()
        except EOFError:  # the asker has closed its end
            return
        pipe.send(subject())


@dataclass(frozen=True)
class Report:
    """What a benchmark found: a sentence, a table, and what has to be known to read it."""

    title: str
    finding: str
    """The outcome and its goal, with the measured numbers."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    method: str
    n: str
    """How many rounds of what."""
    more: str = ""
    """Markdown that follows the table."""
    is_timed: bool = True
    """Whether other programs can have disturbed it."""


def verdict(holds: bool) -> str:
    """Return whether a goal is met, in a word."""
    return "met" if holds else "missed"


def verdict_within(bounds: tuple[float, float], goal: float) -> str:
    """Return whether what lies between `bounds` is at most the `goal`, in a word or two."""
    least, most = bounds
    return "not resolved" if least <= goal < most else verdict(most <= goal)


class Neighbours:
    """How much of the processors others have used since this was made: what may have disturbed a measurement."""

    def __init__(self) -> None:
        self._begin = _times()

    def share(self) -> float:
        """Return the share, 0 to 1. Child processes count as ours once they have ended."""
        wall_s, busy_s, own_s = (now - then for now, then in zip(_times(), self._begin, strict=True))
        return float(max(0.0, (busy_s - own_s) / (wall_s * psutil.cpu_count())))


def _times() -> tuple[float, float, float]:
    """Return seconds: by the clock, of work of all processors, and of our own processes' work."""
    machine, own = psutil.cpu_times(), os.times()
    return time.monotonic(), machine.user + machine.nice + machine.system, sum(own[:4])


def write(name: str, report: Report, *, command: str, disturbed: float | None, folder: Path = RESULTS) -> Path:
    """Write the report as folder/NAME.md and return the path; `disturbed` is the neighbours' share.

    None where it is of no account, since no times were taken.
    """
    lines = [
        f"# {report.title}",
        "",
        report.finding,
        "",
        *(
            ["**Disturbed:** other programs kept the processors busy; measure again.", ""]
            if disturbed is not None and disturbed > DISTURBED
            else []
        ),
        *table(report.columns, report.rows),
        "",
        report.method,
        "",
        *([report.more.rstrip(), ""] if report.more else []),
        *conditions(command, report.n, disturbed),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def conditions(command: str, n: str, disturbed: float | None) -> list[str]:
    """Return lines that say where, when and how it was measured."""
    here = hardware.survey(os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = "".join(f", {gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)" for gpu in here.gpus)
    versions = ", ".join(f"{package} {version_of(package)}" for package in ("torch", "torchvision", "lockstep-torch"))
    return [
        f"- hardware: {here.cpus} × {here.cpu_name}, {here.memory_bytes / 2**30:.0f} GiB{gpus}",
        f"- versions: Python {platform.python_version()}, {versions}"
        + (f", driver {here.driver}" if here.driver else ""),
        f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        + ("" if disturbed is None else f"; other programs used {disturbed:.0%} of the processors"),
        f"- command: `{command}`",
        f"- n: {n}" + ("" if disturbed is None else "; numbers are the median (least–most) over the rounds"),
    ]
