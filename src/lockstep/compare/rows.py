"""The table of a comparison: a row a variant, each number with what it covers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.options import IDENTITY
from ..verify import curve
from . import numbers, records, rounds
from .numbers import Interval, Spread
from .rounds import Series

PARTS = ("data", "compute", "communication", "optimizer", "rest")
"""Of a step: waiting for data, forward and backward, exchanges that nothing hides, the optimizer, and what is left."""
_COMPARED = 5
"""First steps whose losses are compared: rounding that grows from step to step is no other model."""
_FEWEST = 20
"""Steps of which a 95th percentile is told."""
_PHASES = {"data": "data", "step": "optimizer"}
_EXCHANGES = ("all-reduce", "all-gather", "broadcast", "barrier")
_COMPUTE = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a variant; what could not be measured is None."""

    name: str
    flags: tuple[str, ...]
    failed: str = ""
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


def rows(found: Sequence[Series], *, tolerance: float | None = None) -> list[Row]:
    """Return a row for each variant that was tried, in their order.

    `tolerance` is the relative difference of losses that counts as the same model, by default what rounding explains.
    """
    working = [each for each in found if each.races and not each.failed and each.trial is not None]
    return [_row(each, working, tolerance) for each in found]


def _row(series: Series, working: Sequence[Series], tolerance: float | None) -> Row:
    cell, trial = series.cell, series.trial
    if series not in working or trial is None:
        return Row(name=cell.name, flags=cell.flags, failed=series.failed or "it was not run")
    base = rounds.base_of(working)
    alone = next((each for each in working if each.cell.is_alone_of(cell)), None)
    start, told, step_s = series.start, trial.told, trial.step_s
    batch = series.batch
    rate = numbers.of_groups([[each * batch for each in race] for race in series.races])
    middle_s = batch / rate.middle
    flops = told["flops_a_step"] or 0
    gap = _loss_gap(series, base) if batch == base.batch else None
    # What decides the model may vary too: then other losses are no fault.
    is_judged = cell.options.keys().isdisjoint(IDENTITY) and _precision(series) == _precision(base)
    if tolerance is None and base.cell.config is not None:
        tolerance = curve.default_tolerance(base.cell.config)
    another = _another(series, base, gap, tolerance or 0.0) if gap is not None and is_judged else None
    steps = start["steps_per_epoch"]
    return Row(
        name=cell.name,
        flags=cell.flags,
        devices=series.devices,
        ranks=told["ranks"],
        turns=sum(map(len, series.races)),
        batch=start["plan"].get("global_size"),
        samples_per_s=rate,
        ratio=_samples_ratio(series, base),
        speed_up=None if alone is None else _samples_ratio(series, alone),
        step_p50_s=statistics.median(step_s),
        step_p95_s=statistics.quantiles(step_s, n=20, method="inclusive")[18] if len(step_s) >= _FEWEST else None,
        epoch_s=steps * middle_s if steps else None,
        parts_s=_parts_of(told),
        teraflops=flops / middle_s / 1e12 if flops else None,
        matrix_share=flops / middle_s / rate_s if flops and (rate_s := told["matrix_flops_per_s"]) else None,
        bytes_a_step=told["bytes_a_step"],
        host_memory_bytes=told["peak_memory_bytes"]["host"],
        device_memory_bytes=told["peak_memory_bytes"]["device"],
        busy_processors=told["busy_processors"],
        busy_gpus=told.get("busy_gpus"),
        joules_a_step=told["joules_a_step"],
        to_first_step_s=trial.to_first_step_s,
        loss_gap=gap,
        proved=records.proved(told.get("proof")),
        another=another or "",
        same_model=None if another is None else not another,
    )


def _samples_ratio(ours: Series, theirs: Series) -> Interval:
    factor = ours.batch / theirs.batch
    return Interval(*(each * factor for each in rounds.ratio(ours, theirs)))


def _parts_of(told: dict[str, Any]) -> dict[str, float]:
    phases, steps = told["phase_s"], told["step_s"]
    step_s = sum(steps) / len(steps)
    found = dict.fromkeys(PARTS, 0.0)
    for phase, seconds in phases.items():
        part = (
            "communication" if phase in _EXCHANGES else "compute" if phase in _COMPUTE else _PHASES.get(phase, "rest")
        )
        found[part] += seconds
    if "forward" not in phases:  # a loop of one's own, whose forward pass is in its own code
        found["compute"], found["rest"] = found["compute"] + phases.get("", 0.0), found["rest"] - phases.get("", 0.0)
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


def _another(ours: Series, theirs: Series, gap: float, tolerance: float) -> str:
    """Return why the model is not the other's; "" where it is."""
    parts, whole = ours.statistics, theirs.statistics
    if parts != whole:  # another one, however near the first losses are
        return f"each {'replica' if parts[0] != whole[0] else 'micro-batch'} has batch statistics of its own"
    return f"its losses differ by {gap:.1e}" if gap > tolerance else ""


def _loss_gap(ours: Series, theirs: Series) -> float | None:
    """Return the largest relative difference of the first losses that both have; None where they have none."""
    a, b = (curve.losses_of(each.run) for each in (ours, theirs))
    return max((curve.gap(a[step], b[step]) for step in sorted(a.keys() & b.keys())[:_COMPARED]), default=None)


def _precision(series: Series) -> str:
    return "" if series.cell.config is None else series.cell.config.precision.name
