"""Whether `lockstep compare` finds what is slower and nothing else: one variant under two names, one slowed by 5 %."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.compare.numbers import Interval

from .harness import Report, verdict
from .jobs.slowed import SLOWER

_SAME, _SLOWED = 20, 10
"""Comparisons of each kind."""
GOAL_SAME, GOAL_AGAIN, GOAL_SLOWED = 0.95, 0.9, 0.9
GOAL_USUAL_S, GOAL_REST = 120.0, 0.05
_JOB = ("digits", "--strategy", "single", "--devices", "1", "--batch", "256", "--accelerator", "cpu")
_TWO_NAMES = (*_JOB, "--vary", "timeout=600,601", "--budget", "75s")
_TWO_NETS = (*_JOB, "--vary", "model=benchmarks.jobs.slowed:Plain,benchmarks.jobs.slowed:Slow", "--budget", "5m")
_LIMIT_S = 900


@dataclass(frozen=True)
class Compared:
    """What a comparison has told, and how long it took."""

    rows: Sequence[dict[str, Any]]
    answer: Sequence[str]
    seconds: float

    @property
    def ratio(self) -> Interval:
        """Of the second variant's speed to the first one's."""
        found = self.rows[1]["ratio"]
        # JSON has no infinite number: of one race nothing is known.
        return Interval(found["middle"], found["low"] or 0.0, math.inf if found["high"] is None else found["high"])

    @property
    def rest(self) -> float:
        """The largest share of a step that no part accounts for."""
        parts = [row["parts_s"] for row in self.rows if row["parts_s"]]
        return float(max(abs(each["rest"]) / sum(each.values()) for each in parts))


def measure() -> Report:
    """Return how often a winner was told where there is none, and one that there is."""
    with tempfile.TemporaryDirectory() as folder:
        same = [_compared(_TWO_NAMES, Path(folder) / f"same-{number}") for number in range(_SAME)]
        slowed = [_compared(_TWO_NETS, Path(folder) / f"slowed-{number}") for number in range(_SLOWED)]
        usual = _compared(("digits",), Path(folder) / "usual")
    told_none = sum(each.ratio.holds(1.0) for each in same)
    pairs = list(zip(same[::2], same[1::2], strict=True))
    again = sum(a.ratio.holds(b.ratio.middle) and b.ratio.holds(a.ratio.middle) for a, b in pairs)
    found = sum(each.ratio.high < 1 for each in slowed)
    rest = max(each.rest for each in (*same, *slowed, usual))
    rows = [
        ("one variant under two names: no winner", f"{told_none} of {_SAME}", told_none >= GOAL_SAME * _SAME),
        (
            "two such comparisons: each ratio in the other's interval",
            f"{again} of {len(pairs)}",
            again >= GOAL_AGAIN * len(pairs),
        ),
        (f"a variant slowed by {SLOWER:.0%}: found", f"{found} of {_SLOWED}", found >= GOAL_SLOWED * _SLOWED),
        ("the share of a step in no part, at most", f"{rest:.1%}", rest <= GOAL_REST),
        ("`lockstep compare digits`, until it recommends", f"{usual.seconds:.0f} s", usual.seconds <= GOAL_USUAL_S),
    ]
    return Report(
        title="What a comparison finds",
        finding="; ".join(f"{what}: {text} ({verdict(is_met)})" for what, text, is_met in rows) + ".",
        columns=("what", "found", "goal"),
        rows=[(what, text, verdict(is_met)) for what, text, is_met in rows],
        method=f"Each comparison is a command of its own: `lockstep compare {' '.join(_TWO_NAMES)}`, and the same with "
        f"`{' '.join(_TWO_NETS[-4:])}`, whose second net waits in each step for {SLOWER:.0%} of its usual time "
        f"(goals: {GOAL_SAME:.0%}, {GOAL_AGAIN:.0%}, {GOAL_SLOWED:.0%}, {GOAL_REST:.0%}, {GOAL_USUAL_S:.0f} s).",
        n=f"{_SAME} and {_SLOWED} comparisons",
        more="\n".join(
            [
                f"Ratios under two names: {', '.join(map(_shown, same))}.",
                "",
                f"Ratios of the slowed one: {', '.join(map(_shown, slowed))}.",
                "",
                *(f"> {sentence}" for sentence in usual.answer),
            ]
        ),
    )


def _shown(compared: Compared) -> str:
    ratio = compared.ratio
    return f"{ratio.middle:.3f} ({ratio.low:.3f}–{ratio.high:.3f}; {compared.seconds:.0f} s)"


def _compared(words: Sequence[str], folder: Path) -> Compared:
    """Run the comparison. Raises `RuntimeError` where it fails."""
    begun_s = time.monotonic()
    command = (sys.executable, "-m", "lockstep", "compare", *words, "--output", str(folder))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    told = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = Compared(told["rows"], told["answer"], time.monotonic() - begun_s)
    # An hour's work is not lost by its end.
    print(f"{folder.name}: {_shown(found)}, the rest {found.rest:.1%}", flush=True)
    return found
