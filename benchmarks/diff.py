"""How long `lockstep diff` takes over two checkpoints of 100 MB, once torch is imported."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from lockstep.checkpoint import Checkpoints, foreign
from lockstep.checkpoint.state import State
from lockstep.checks import difference

from .harness import Report, interleave, verdict

GOAL_S = 2.0
ROUNDS = 7
LAYERS = 40
SHAPE = (640, 1024)  # 2.6 MB each


def measure() -> Report:
    """Return the seconds of reading, with checksums, and comparing, where no tensor is the same and where all are."""
    with tempfile.TemporaryDirectory() as folder:
        a, b = (_saved(Path(folder) / name, factor) for name, factor in (("a", 1.0), ("b", 1.0 + 1e-6)))
        found = interleave({"all differ": lambda: _seconds(a, b), "the same": lambda: _seconds(a, a)}, rounds=ROUNDS)
    worst = found["all differ"]
    return Report(
        title="How long it takes to compare two checkpoints",
        finding=f"Two checkpoints of 100 MB, every element different, are read, verified and compared in "
        f"{worst.median:.2f} s (goal {GOAL_S:.0f}, {verdict(worst.median <= GOAL_S)}).",
        columns=("checkpoints", "seconds"),
        rows=tuple((name, series.text()) for name, series in found.items()),
        method=f"{LAYERS} float32 tensors of {SHAPE[0]} × {SHAPE[1]} in each, files in the page cache; the checksums "
        "of both are verified.",
        n=f"{ROUNDS} rounds of each",
    )


def _saved(run: Path, factor: float) -> Path:
    made = {
        f"model/layers.{number}.weight": torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)) * factor
        for number in range(LAYERS)
    }
    saver = Checkpoints(run / "checkpoints", warn=print)
    saver.save(State(made, {"step": 1}), step=1, best=False)
    saver.wait()
    return run


def _seconds(a: Path, b: Path) -> float:
    begin_s = time.perf_counter()
    found = difference.compare(foreign.read(a), foreign.read(b))
    assert len(found.differences) == (0 if a == b else LAYERS)
    return time.perf_counter() - begin_s
