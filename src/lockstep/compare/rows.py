"""The table of a comparison: a row a variant, or a run that has ended; each number with what it covers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.options import IDENTITY
from ..verify import curve
from . import numbers, records, rounds, trainings
from .grid import Cell
from .numbers import Interval, Spread
from .past import Run, differing
from .rounds import Series

PARTS = ("data", "compute", "communication", "optimizer", "rest")
"""Of a step: waiting for data, forward and backward, exchanges that nothing hides, the optimizer, and what is left."""
_COMPARED = 5
"""First steps whose losses are compared: rounding that grows from step to step is no other model."""
_FEWEST = 20
"""Steps of which a 95th percentile is told."""
_EXCHANGES = ("all-reduce", "all-gather", "broadcast", "barrier")
_PART_OF = {"data": "data", "forward": "compute", "backward": "compute", "step": "optimizer"}
_PART_OF |= dict.fromkeys(_EXCHANGES, "communication")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a variant; what could not be measured is None."""

    name: str
    flags: tuple[str, ...]
    failed: str = ""
    series: Series = field(default_factory=lambda: Series(Cell(name="", flags=())))
    """What it was made of; empty of a run that has ended."""
    devices: int = 1
    ranks: int = 1
    turns: int = 0
    batch: int | None = None
    samples_per_s: Interval | None = None
    ratio: Interval | None = None
    """Of samples/s, to the first row that is one device, else to the first that is its model; 1 of that one itself."""
    speed_up: Interval | None = None
    """Of samples/s, to the row that is the same on one device; None where there is none."""
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    epoch_s: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)
    """Of a mean step, by `PARTS`: they sum to it."""
    teraflops: float | None = None
    """Floating-point operations of matrix products and convolutions, in 10¹² a second."""
    matrix_share: float | None = None
    """Of the rate at which all ranks multiply large matrices, measured then."""
    bytes_a_step: float | None = None
    """That a rank gives to collectives: gradients, and statistics of BatchNorm."""
    host_memory_bytes: float | None = None
    device_memory_bytes: float | None = None
    busy_processors: float | None = None
    busy_gpus: float | None = None
    """In which a kernel ran, as NVML tells of its last second: 2 where two were busy all the time."""
    joules_a_step: float | None = None
    to_first_step_s: float | None = None
    accuracy: Spread | None = None
    """At the end of whole trainings: the share of samples that are right. This and what follows: over seeds."""
    best_accuracy: float | None = None
    """Of all evaluations."""
    seeds: int | None = None
    """Whole trainings."""
    trained_s: Spread | None = None
    """Of their training steps, without evaluations; `trained_epoch_s`: of a mean epoch."""
    trained_epoch_s: Spread | None = None
    reached: int | None = None
    """Seeds for which an evaluation reached the accuracy that was asked for; None where none was."""
    to_accuracy_steps: Spread | None = None
    """Steps, and their seconds, until then."""
    to_accuracy_s: Spread | None = None
    loss_gap: float | None = None
    """The largest relative difference of the first steps' losses to those of the row that `ratio` is to."""
    proved: str = ""
    """Checks that hold, or fail: of the trial's replicas or, after whole trainings, of all that they have proved."""
    another: str = ""
    """Why it is another model, where that is judged."""
    same_model: bool | None = None
    """Whether the losses agree within the tolerance, and batch statistics are of as many samples; None in another
    precision, or where what varies is the model."""

    def tells(self, part: str) -> bool:
        """Whether a part of the step is known: replicas in one process exchange within their computation."""
        return part != "communication" or self.ranks > 1 or self.devices == 1

    @property
    def efficiency(self) -> float | None:
        """The speed-up, by the number of devices."""
        return None if self.speed_up is None else self.speed_up.middle / self.devices


def of_series(found: Sequence[Series], *, tolerance: float | None = None, target: float | None = None) -> list[Row]:
    """Return a row for each variant that was tried, in their order.

    `tolerance` is the relative difference of losses that counts as the same model, by default what rounding explains;
    `target` the accuracy to which they were trained.
    """
    working = [each for each in found if each.races and not each.failed and each.trial is not None]
    rows = []
    for each in found:
        row = Row(name=each.cell.name, flags=each.cell.flags, failed=each.failed or "it was not run")
        rows.append(_of_working(each, working, tolerance) if each in working else row)
    return [replace(row, **trainings.fields(each, target)) for row, each in zip(rows, found, strict=True)]


def _of_working(series: Series, working: Sequence[Series], tolerance: float | None) -> Row:
    cell, told, step_s, batch = series.cell, series.told, series.told["step_s"], series.batch
    base = rounds.base_of(working)
    alone = next((each for each in working if each.cell.is_alone_of(cell)), None)
    rate = numbers.of_groups([[each * batch for each in race] for race in series.races])
    middle_s = batch / rate.middle
    steps, flops, matrix_rate = series.record.start["steps_per_epoch"], told["flops_a_step"], told["matrix_flops_per_s"]
    return Row(
        name=cell.name,
        flags=cell.flags,
        series=series,
        devices=series.devices,
        ranks=told["ranks"],
        turns=sum(map(len, series.races)),
        batch=series.plan.get("global_size"),
        samples_per_s=rate,
        ratio=series.ratio(base),
        speed_up=None if alone is None else series.ratio(alone),
        step_p50_s=statistics.median(step_s),
        step_p95_s=statistics.quantiles(step_s, n=20, method="inclusive")[18] if len(step_s) >= _FEWEST else None,
        epoch_s=steps * middle_s if steps else None,
        parts_s=_parts_of(told),
        teraflops=flops / middle_s / 1e12 if flops else None,
        matrix_share=flops / middle_s / matrix_rate if flops and matrix_rate else None,
        bytes_a_step=told["bytes_a_step"],
        host_memory_bytes=told["peak_memory_bytes"]["host"],
        device_memory_bytes=told["peak_memory_bytes"]["device"],
        busy_processors=told["busy_processors"],
        busy_gpus=told.get("busy_gpus"),
        joules_a_step=told["joules_a_step"],
        to_first_step_s=series.trial.to_first_step_s if series.trial else None,
        proved=records.proved(told.get("proof")),
        **_likeness(series, base, tolerance),
    )


def _parts_of(told: dict[str, Any]) -> dict[str, float]:
    phases, steps = told["phase_s"], told["step_s"]
    step_s = sum(steps) / len(steps)
    found = dict.fromkeys(PARTS, 0.0)
    for phase, seconds in phases.items():
        # The forward pass of a loop of one's own is in its own code, which no phase names.
        part = "compute" if phase == "" and "forward" not in phases else _PART_OF.get(phase, "rest")
        found[part] += seconds
    if unsynchronised := told.get("unsynchronised_step_s"):
        # What a backward pass waits for inside, no phase tells. Steps that exchange no gradients are faster by that and
        # by what the phases do tell of gradients: their exchanges, but for those that such steps have too.
        hidden = step_s - sum(unsynchronised) / len(unsynchronised)
        others = sum(seconds for phase, seconds in told["unsynchronised_phase_s"].items() if phase in _EXCHANGES)
        outside = min(max(hidden - (found["communication"] - others), 0.0), found["compute"])
        found["compute"] -= outside
        found["communication"] += outside
    found["rest"] += step_s - sum(found.values())
    return found


def _likeness(ours: Series, base: Series, tolerance: float | None) -> dict[str, Any]:
    """Return whether two variants are one model, as fields of a `Row`; of other global batches nothing is known."""
    if ours.batch != base.batch:
        return {}
    a, b = ours.record.losses, base.record.losses
    gap = max((curve.gap(a[step], b[step]) for step in sorted(a.keys() & b.keys())[:_COMPARED]), default=None)
    configs = [each.cell.config for each in (ours, base)]
    precisions = {"" if config is None else config.precision.name for config in configs}
    # What decides the model may vary too: then other losses are no fault.
    if gap is None or len(precisions) > 1 or not ours.cell.options.keys().isdisjoint(IDENTITY):
        return {"loss_gap": gap}
    if tolerance is None:
        tolerance = 0.0 if configs[1] is None else curve.default_tolerance(configs[1])
    another = f"its losses differ by {gap:.1e}" if gap > tolerance else ""
    if (parts := ours.batch_parts) != (whole := base.batch_parts):  # another model, however near the first losses are
        another = f"each {'replica' if parts[0] != whole[0] else 'micro-batch'} has batch statistics of its own"
    return {"loss_gap": gap, "another": another, "same_model": not another}


def of_runs(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each run; speeds have no interval, since each was measured once."""
    found = [_of_run(run, runs[0]) for run in runs]
    rated = [row for row in found if row.samples_per_s is not None]
    base = next((row for row in rated if row.devices == 1), rated[0] if rated else None)
    if base is None or base.samples_per_s is None:
        return found
    base_rate = base.samples_per_s.middle
    return [
        row if row.samples_per_s is None else replace(row, ratio=_once(row.samples_per_s.middle / base_rate))
        for row in found
    ]


def _of_run(run: Run, first: Run) -> Row:
    summary, plan, chosen = run.summary, run.record.start.get("plan") or {}, run.record.start.get("chosen") or {}
    memory, rate, epochs = summary.get("peak_memory_bytes") or {}, run.samples_per_s, summary.get("epoch_s") or []
    differ = differing([first, run])[1] if run is not first else {}
    return Row(
        name=run.name,
        flags=tuple(word for key, value in differ.items() for word in (f"--{key}", str(value))),
        devices=int(chosen.get("devices") or plan.get("ranks") or 1),
        ranks=int(plan.get("ranks") or 1),
        batch=plan.get("global_size"),
        samples_per_s=_once(rate) if rate else None,
        failed="" if rate else f"ended with exit code {summary.get('exit')}, and no speed was recorded",
        step_p50_s=summary.get("step_p50_s"),
        step_p95_s=summary.get("step_p95_s"),
        epoch_s=statistics.fmean(map(float, epochs)) if epochs else None,
        host_memory_bytes=memory.get("host"),
        device_memory_bytes=memory.get("device") or None,
        proved=records.proved(summary.get("proof")),
        accuracy=None if (top1 := summary.get("top1")) is None else numbers.spread([float(top1)]),
    )


def _once(value: float) -> Interval:
    return Interval(value, 0.0, math.inf)
