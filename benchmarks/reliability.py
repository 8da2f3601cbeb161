"""What becomes of runs whose ranks are killed, stopped or exit, at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from .faults import EVERY, LIMIT_S, Run, running
from .harness import Report, verdict

FAULTS = 100
AT_ONCE = 2
"""Runs: the faults come on a busy machine as well."""
RANKS = (2, 3, 4)
STALL_S = 3
MOMENTS = ("start", "step", "save", "evaluation")
KINDS = ("SIGKILL", "SIGSTOP", "exit")
_DRAWS = 20
_START_S = 3.0  # in which ranks import torch and meet
_STEPS = 70
_CLOSE_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What came of a run with one fault."""

    moment: str
    kind: str
    ranks: int
    end: str
    """same bits, other bits, hangs, orphans, or failed."""
    steps_lost: int
    """Recorded when the fault came, and made again."""


def measure() -> Report:
    """Return what came of the faults."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return report(list(pool.map(outcome, range(FAULTS))))


def report(outcomes: Sequence[Outcome]) -> Report:
    """Return the table of these outcomes."""
    ends = Counter(each.end for each in outcomes)
    count, lost = len(outcomes), max(each.steps_lost for each in outcomes)
    good = ends["same bits"] == count
    return Report(
        title="What becomes of a run when one of its ranks dies",
        finding=f"{ends['same bits']} of {count} runs with a fault ended with the very same bits as one without (goal: "
        f"all, {verdict(good)}), with at most {lost} steps made again (goal {EVERY}, {verdict(lost <= EVERY)}).",
        columns=("moment", "fault", "runs", "same bits", "other bits", "hangs", "orphans", "failed", "steps lost"),
        rows=tuple(
            (
                moment,
                kind,
                f"{len(some)}",
                *(f"{sum(each.end == end for each in some)}" for end in _ENDS),
                f"≤ {max(each.steps_lost for each in some)}",
            )
            for moment in MOMENTS
            for kind in KINDS
            if (some := [each for each in outcomes if (each.moment, each.kind) == (moment, kind)])
        ),
        method=f"`lockstep train` on {RANKS[0]} to {RANKS[-1]} ranks with --max-restarts 2 and --stall-timeout "
        f"{STALL_S}, a checkpoint every {EVERY} steps and an evaluation every 10. A random rank is killed, stopped, or "
        "calls os._exit: while the ranks start, at a random step, as a checkpoint is due, or as an evaluation begins. "
        "A fault that a run did not notice, because it was over, is not counted. The bits are those of all tensors in "
        "the last checkpoint: parameters and momentum.",
        n=f"{count} faults, drawn with the seeds 0 to {count - 1}, {AT_ONCE} runs at a time",
        is_timed=False,
    )


_ENDS = ("same bits", "other bits", "hangs", "orphans", "failed")


def outcome(number: int) -> Outcome:
    """Return what came of the fault that is drawn with this seed."""
    draw = random.Random(number)
    moment, kind, ranks = MOMENTS[number % len(MOMENTS)], draw.choice(KINDS), draw.choice(RANKS)
    for _ in range(_DRAWS):
        with tempfile.TemporaryDirectory() as folder:
            found = _with_fault(Path(folder), draw, moment, kind, ranks)
        if found is not None:
            return found
    raise RuntimeError(f"the fault of seed {number} never came in time")


@cache
def _undisturbed(ranks: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), "--devices", ranks) as run:
        run.process.wait(LIMIT_S)
        return run.weights()


def _with_fault(folder: Path, draw: random.Random, moment: str, kind: str, ranks: int) -> Outcome | None:
    """Return how a run with this fault ended; None if it was over before."""
    rank = draw.randrange(ranks)
    with running(folder, "--devices", ranks, "--max-restarts", 2, "--stall-timeout", STALL_S, "--timeout", 15) as run:
        victims = run.until_ranks(ranks)
        _wait(run, draw, moment)
        made = len(run.steps())
        _fault(kind, rank, run, victims)
        try:
            _, said = run.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return Outcome(moment, kind, ranks, "hangs", 0)
        if "(restart 1 of 2)" not in said:
            was_over = run.process.returncode == 0 and run.starts() == 1
            return None if was_over else Outcome(moment, kind, ranks, "failed", 0)
        lost = max(0, made - max(run.begun_at(), default=0))
        if run.left():
            end = "orphans"
        elif run.process.returncode != 0:
            end = "failed"
        else:
            end = "same bits" if run.weights() == _undisturbed(ranks) else "other bits"
        return Outcome(moment, kind, ranks, end, lost)


def _wait(run: Run, draw: random.Random, moment: str) -> None:
    if moment == "start":
        time.sleep(draw.uniform(0, _START_S))
    elif moment == "evaluation":
        run.until(lambda: run.evaluations() > draw.randrange(5))
        time.sleep(draw.uniform(0, 5 * _CLOSE_S))
    else:
        step = draw.randrange(1, _STEPS)
        run.until_step(step - step % EVERY + EVERY if moment == "save" else step)
        time.sleep(draw.uniform(0, _CLOSE_S))


def _fault(kind: str, rank: int, run: Run, victims: Sequence[psutil.Process]) -> None:
    if kind == "exit":
        (run.folder / f"exit_{rank}").touch()
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(victims[rank].pid, signal.Signals[kind])
