"""The rows of a comparison's table: variants, or runs that ended."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.options import IDENTITY
from ..monitor.progress import EXCHANGES
from ..verify import curve
from . import measured, numbers, records, rounds
from .grid import Cell
from .numbers import Interval, Spread
from .records import ACCURACY, SECONDS, STEP, Run
from .rounds import Series

PARTS = ("data", "compute", "communication", "optimizer", "rest")
"""Of a step: waiting for data, forward and backward, exchanges that nothing hides, the optimizer, and what is left."""
_FEWEST = 20  # steps of which a 95th percentile is told
_PART_OF = {"data": "data", "forward": "compute", "backward": "compute", "step": "optimizer"}
_PART_OF |= dict.fromkeys(EXCHANGES, "communication")
_AS_TOLD = ("ranks", "bytes_a_step", "busy_processors", "busy_gpus", "joules_a_step")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of a variant or run, explained in docs/compare.md.

    Missing measurements are None; a `Spread` is over seeds.
    """

    name: str
    flags: tuple[str, ...]
    failed: str = ""
    series: Series = field(default_factory=lambda: Series(Cell(name="", flags=())))
    """The variant's measurements; empty for a run that has ended."""
    devices: int = 1
    ranks: int = 1
    turns: int = 0
    batch: int | None = None
    samples_per_s: Interval | None = None
    ratio: Interval | None = None
    """Of samples/s, to the first row that is one device, else to the first that is its model; 1 of that one itself."""
    speed_up: Interval | None = None  # of samples/s, to the row that is the same on one device
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    epoch_s: float | None = None
    parts_s: dict[str, float] = field(default_factory=dict)  # of a mean step, by `PARTS`: they sum to it
    teraflops: float | None = None
    matrix_share: float | None = None
    bytes_a_step: float | None = None
    host_memory_bytes: float | None = None
    device_memory_bytes: float | None = None
    busy_processors: float | None = None
    busy_gpus: float | None = None
    joules_a_step: float | None = None
    to_first_step_s: float | None = None
    accuracy: Spread | None = None
    seeds: int | None = None
    trained_s: Spread | None = None
    trained_epoch_s: Spread | None = None
    reached: int | None = None  # seeds for which an evaluation reached the accuracy that was asked for
    to_accuracy_steps: Spread | None = None
    to_accuracy_s: Spread | None = None
    loss_gap: float | None = None
    """The largest relative difference of the first steps' losses to those of the row that `ratio` is to."""
    proved: str = ""
    another: str = ""  # why it is another model, where that is judged
    same_model: bool | None = None
    """Whether losses agree within the tolerance, and batch statistics are of as many samples; None where precision or
    model vary."""

    @property
    def efficiency(self) -> float | None:
        """The speed-up, by the number of devices."""
        return None if self.speed_up is None else self.speed_up.middle / self.devices


def of_series(found: Sequence[Series], *, tolerance: float | None = None, target: float | None = None) -> list[Row]:
    """Return a row for each tried variant, in their order.

    `tolerance` is the relative difference of losses that counts as the same model, by default what rounding explains;
    `target` the accuracy that ends each training.
    """
    working = [each for each in found if each.races and not each.failed]
    rows = []
    for each in found:
        fields: dict[str, Any] = {"failed": each.failed or "it was not run"}
        if each in working:
            fields = _measured(each, working, tolerance) | _trained(each, target)
        rows.append(Row(name=each.cell.name, flags=each.cell.flags, series=each, **fields))
    return rows


def _measured(series: Series, working: Sequence[Series], tolerance: float | None) -> dict[str, Any]:
    told, record, batch = series.trial.told, series.record, series.batch
    base, step_s = rounds.base_of(working), told["step_s"]
    alone = next((each for each in working if each.cell.is_alone_of(series.cell)), None)
    rate = numbers.geometric_mean(series.rates).times(batch)
    middle_s = batch / rate.middle
    steps, flops, matrix_rate = record.start["steps_per_epoch"], told["flops_a_step"], told["matrix_flops_per_s"]
    return {
        **{name: told.get(name) for name in _AS_TOLD},
        **{f"{kind}_memory_bytes": size for kind, size in told["peak_memory_bytes"].items()},
        **_likeness(series, base, tolerance),
        "devices": record.devices,
        "turns": sum(map(len, series.races)),
        "batch": record.plan.get("global_size"),
        "samples_per_s": rate,
        "ratio": series.ratio(base),
        "speed_up": None if alone is None else series.ratio(alone),
        "step_p50_s": statistics.median(step_s),
        "step_p95_s": statistics.quantiles(step_s, n=20, method="inclusive")[18] if len(step_s) >= _FEWEST else None,
        "epoch_s": steps * middle_s if steps else None,
        "parts_s": _parts_of(told),
        "teraflops": flops / middle_s / 1e12 if flops else None,
        "matrix_share": flops / middle_s / matrix_rate if flops and matrix_rate else None,
        "to_first_step_s": series.trial.to_first_step_s,
        "proved": records.proved(told.get("proof")),
    }


def _parts_of(told: dict[str, Any]) -> dict[str, float]:
    phases, steps = told["phase_s"], told["step_s"]
    step_s = sum(steps) / len(steps)
    found = dict.fromkeys(PARTS, 0.0)
    for phase, seconds in phases.items():
        # The forward pass of a loop of one's own is in its own code, which no phase names.
        part = "compute" if phase == "" and "forward" not in phases else _PART_OF.get(phase, "rest")
        found[part] += seconds
    if unsynchronised := told.get("unsynchronised_step_s"):
        # No phase shows waits within a backward pass. Steps that exchange no gradients are faster by those waits and by
        # the phases of gradient exchanges: all exchange phases but those that such steps have too.
        hidden = step_s - sum(unsynchronised) / len(unsynchronised)
        others = sum(seconds for phase, seconds in told["unsynchronised_phase_s"].items() if phase in EXCHANGES)
        outside = min(max(hidden - (found["communication"] - others), 0.0), found["compute"])
        found["compute"] -= outside
        found["communication"] += outside
    found["rest"] += step_s - sum(found.values())
    return {part: max(0.0, round(seconds, 9)) for part, seconds in found.items()}  # below a nanosecond is rounding


def _likeness(ours: Series, base: Series, tolerance: float | None) -> dict[str, Any]:
    """Compare the models of two variants with the same global batch."""
    if ours.batch != base.batch:
        return {}
    a, b = ours.record.losses, base.record.losses
    gap = max((curve.gap(a[step], b[step]) for step in sorted(a.keys() & b.keys())[: measured.COMPARED]), default=None)
    configs = [each.cell.config for each in (ours, base)]
    precisions = {"" if config is None else config.precision.name for config in configs}
    # Options that define the model may vary too: then other losses are no fault.
    if gap is None or len(precisions) > 1 or not ours.cell.options.keys().isdisjoint(IDENTITY):
        return {"loss_gap": gap}
    if tolerance is None:
        tolerance = 0.0 if configs[1] is None else curve.default_tolerance(configs[1])
    another = f"its losses differ by {gap:.1e}{_why(ours, base)}" if gap > tolerance else ""
    if (parts := ours.batch_parts) != (whole := base.batch_parts):  # another model, however near the first losses are
        another = f"each {'replica' if parts[0] != whole[0] else 'micro-batch'} has batch statistics of its own"
    return {"loss_gap": gap, "another": another, "same_model": not another}


def _why(ours: Series, base: Series) -> str:
    """Return what is known of why the losses of two variants differ, after a colon; "" for nothing."""
    undrawn, place = (
        next((str(told[name]) for told in (ours.trial.told, base.trial.told) if told.get(name)), "")
        for name in ("undrawn", "first_draw")
    )
    if undrawn:
        return f": each rank draws random numbers of its own, since those of one device failed ({undrawn.rstrip('.')})"
    if place and (parts := ours.draw_parts) != (whole := base.draw_parts):
        part = "replica in a process" if parts[0] != whole[0] else "micro-batch"
        return f": each {part} draws random numbers of its own; the first: {place}"
    return ""


def _trained(series: Series, target: float | None) -> dict[str, Any]:
    if not series.trainings:
        return {}
    told = [each.told for each in series.trainings.values() if not each.failed]
    ends, reached = ([each["evals"][-1] for each in told if each[kind]] for kind in ("evals", "reached"))
    found: dict[str, Any] = {
        "seeds": len(told),
        "accuracy": numbers.spread([each[ACCURACY] for each in ends]),
        "trained_s": numbers.spread([each["train_s"] for each in told]),
        "trained_epoch_s": numbers.spread([statistics.fmean(each["epoch_s"]) for each in told if each["epoch_s"]]),
        "reached": None if target is None else len(reached),
        "to_accuracy_steps": numbers.spread([each[STEP] for each in reached]),
        "to_accuracy_s": numbers.spread([each[SECONDS] for each in reached]),
    }
    for seed, each in series.trainings.items():
        found |= {"failed": f"training with seed {seed} failed: {each.failed}"} if each.failed else {}
    proved = "; ".join(dict.fromkeys(each["proved"] for each in told if each.get("proved")))
    return found | ({"proved": proved} if proved else {})


def difference(ours: Row, theirs: Row, at: int, *, reached: bool = False) -> Interval:
    """Return the mean difference of last evaluations, in `SECONDS` or `ACCURACY`.

    Over the seeds of both or, with `reached`, those for which both reached the accuracy.
    """
    kind = "reached" if reached else "evals"
    mine, other = (
        {seed: each.told["evals"][-1][at] for seed, each in row.series.trainings.items() if each.told.get(kind)}
        for row in (ours, theirs)
    )
    return numbers.mean([value - other[seed] for seed, value in mine.items() if seed in other])


def of_runs(runs: Sequence[Run]) -> list[Row]:
    """Return one row per run. Speeds measured once have no interval."""
    rates = [(run.samples_per_s, run.record.devices) for run in runs if run.samples_per_s]
    base = next((rate for rate, devices in rates if devices == 1), rates[0][0] if rates else None)
    return [_of_run(run, runs[0], base) for run in runs]


def _of_run(run: Run, first: Run, base: float | None) -> Row:
    summary, record, rate = run.summary, run.record, run.samples_per_s
    memory, epochs, top1 = summary.get("peak_memory_bytes") or {}, summary.get("epoch_s") or [], summary.get("top1")
    differ = records.differing([first, run])[1]
    return Row(
        name=run.name,
        flags=tuple(word for key, value in differ.items() for word in (f"--{key}", str(value))),
        failed="" if rate else f"ended with exit code {summary.get('exit')}, and no speed was recorded",
        devices=record.devices,
        ranks=int(record.plan.get("ranks") or 1),
        batch=int(record.plan.get("global_size") or 0) or None,
        samples_per_s=_once(rate) if rate else None,
        ratio=_once(rate / base) if rate and base else None,
        step_p50_s=summary.get("step_p50_s"),
        step_p95_s=summary.get("step_p95_s"),
        epoch_s=statistics.fmean(map(float, epochs)) if epochs else None,
        host_memory_bytes=int(memory.get("host") or 0) or None,
        device_memory_bytes=int(memory.get("device") or 0) or None,
        proved=records.proved(summary.get("proof")),
        accuracy=None if top1 is None else numbers.spread([float(top1)]),
    )


def _once(value: float) -> Interval:
    return Interval(value, 0.0, math.inf)
