"""What `lockstep compare` itself costs the steps that it times: the same training, watched and not."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep import RunConfig, World, override, train
from lockstep.compare import measured
from lockstep.config.options import recipe

from .harness import Report, interleave, verdict
from .loops import Marks, configured

GOAL = 0.01
STEPS = 500
ROUNDS = 30
DIGITS_STEPS = 40
DIGITS_ROUNDS = 10


def measure() -> Report:
    """Return microseconds a step of both, and their difference as a share of a step of the digits recipe."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tiny = configured(model="mlp", data="benchmarks.overhead:images", batch=64, precision="fp32", max_steps=STEPS + 1)
    digits = override(recipe("digits"), strategy="single", epochs=1000, max_steps=DIGITS_STEPS, log_every=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.jsonl"
            both = {"plain": _trained(tiny, path, watched=False), "watched": _trained(tiny, path, watched=True)}
            found = interleave(both, rounds=ROUNDS, warm_up=3)
            step = interleave({"digits": _trained(digits, path, watched=False)}, rounds=DIGITS_ROUNDS)["digits"]
    finally:
        torch.set_num_threads(threads)
    over = found["watched"].minus(found["plain"])
    share = over.median / step.median
    return Report(
        title="What measuring costs what is measured",
        finding=f"Noting when the phases of each step end costs {over.median:+.1f} µs a step, {share:.2%} of a step of "
        f"the digits recipe on one thread (goal: at most {GOAL:.0%}, {verdict(share <= GOAL)}).",
        columns=("training", "µs a step", "over the plain one, µs"),
        rows=(
            ("`mlp`, plain", found["plain"].text(".1f"), ""),
            ("`mlp`, watched", found["watched"].text(".1f"), over.text("+.1f")),
            ("`digits`, plain", step.text(".0f"), ""),
        ),
        method=f"Both are `lockstep.train`, metrics recorded, one thread, one process. Model `mlp` (64–128–10), batch "
        f"64, {STEPS} steps a block: a step so short that what is noted shows. Operations are counted in one step that "
        "is not timed, memory and processors are read once, after the timed steps.",
        n=f"{ROUNDS} rounds of both; {DIGITS_ROUNDS} of digits, {DIGITS_STEPS} steps each",
    )


def _trained(config: RunConfig, path: Path, *, watched: bool) -> Callable[[], float]:
    """Return a function that trains, and returns µs a step."""

    def run() -> float:
        marks, world = Marks(path), World.alone()
        try:
            if watched:  # the end of each phase is noted, as in a trial
                measurement = measured.Measurement(world, lambda _: (None for _ in itertools.count()))
                measurement.is_measurement = False
                train(config, measurement.world, marks, hooks=measurement)
            else:
                train(config, world, marks)
        finally:
            marks.close()
        return marks.step_s * 1e6

    return run
