"""The rows of a comparison's table: variants, or runs that ended."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.options import IDENTITY
from ..config.registry import UNSCALED
from ..monitor.progress import EXCHANGES
from ..verify import curve
from . import measured, numbers, records, rounds
from .grid import Cell
from .numbers import Interval, Spread
from .records import ACCURACY, SECONDS, STEP, Run
from .rounds import Series

PARTS = ("data", "compute", "communication", "optimizer", "rest")
"""Parts of a step: waiting for data, forward and backward, exchanges not hidden by computation, optimizer, the rest."""
_FEWEST = 20  # steps required for a 95th percentile
_PART_OF = {"data": "data", "forward": "compute", "backward": "compute", "step": "optimizer"}
_PART_OF |= dict.fromkeys(EXCHANGES, "communication")
_COPIED = ("ranks", "bytes_a_step", "busy_processors", "busy_gpus", "joules_a_step")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The numbers of a variant or run, explained in docs/compare.md.

    Missing measurements are None; a `Spread` is over seeds.
    """

    name: str
    flags: tuple[str, ...]
    failed: str = ""
    series: Series = field(default_factory=lambda: Series(Cell(name="", flags=())))
    """The variant's measurements; empty for an ended run."""
    devices: int = 1
    ranks: int = 1
    turns: int = 0
    batch: int | None = None
    samples_per_s: Interval | None = None
    ratio: Interval | None = None
    """Of samples/s, to the reference row (`rounds.base_of`), whose ratio is 1."""
    speed_up: Interval | None = None  # of samples/s, to the same variant on one device
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
    reached: int | None = None  # seeds for which an evaluation reached the target accuracy
    to_accuracy_steps: Spread | None = None
    to_accuracy_s: Spread | None = None
    loss_gap: float | None = None
    """The largest relative difference of the first steps' losses from the reference row's."""
    proved: str = ""
    another: str = ""  # why it is another model, if judged
    same_model: bool | None = None
    """Whether losses agree within the tolerance, and batch statistics cover as many samples; None if precision or model
    vary."""

    @property
    def efficiency(self) -> float | None:
        """Speed-up per device."""
        return None if self.speed_up is None else self.speed_up.middle / self.devices


def of_series(series: Sequence[Series], *, tolerance: float | None = None, target: float | None = None) -> list[Row]:
    """Return one row per variant, in order.

    `tolerance` is the largest relative difference of losses of the same model, by default that of rounding; `target` is
    the accuracy that ends each training.
    """
    working = [variant for variant in series if variant.races and not variant.failed]
    rows = []
    for variant in series:
        fields: dict[str, Any] = {"failed": variant.failed or "it was not run"}
        if variant in working:
            fields = _measured(variant, working, tolerance) | _trained(variant, target)
        rows.append(Row(name=variant.cell.name, flags=variant.cell.flags, series=variant, **fields))
    return rows


def _measured(series: Series, working: Sequence[Series], tolerance: float | None) -> dict[str, Any]:
    costs, record, batch = series.trial.results, series.record, series.batch
    base, step_s = rounds.base_of(working), costs["step_s"]
    alone = next((variant for variant in working if variant.cell.is_alone_of(series.cell)), None)
    rate = numbers.geometric_mean(series.rates).times(batch)
    middle_s = batch / rate.middle
    steps, flops, matrix_rate = record.start["steps_per_epoch"], costs["flops_a_step"], costs["matrix_flops_per_s"]
    return {
        **{name: costs.get(name) for name in _COPIED},
        **{f"{kind}_memory_bytes": size for kind, size in costs["peak_memory_bytes"].items()},
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
        "parts_s": _parts_of(costs),
        "teraflops": flops / middle_s / 1e12 if flops else None,
        "matrix_share": flops / middle_s / matrix_rate if flops and matrix_rate else None,
        "to_first_step_s": series.trial.to_first_step_s,
        "proved": records.proved(costs.get("proof")),
    }


def _parts_of(costs: dict[str, Any]) -> dict[str, float]:
    phases, steps = costs["phase_s"], costs["step_s"]
    step_s = sum(steps) / len(steps)
    parts_s = dict.fromkeys(PARTS, 0.0)
    for phase, seconds in phases.items():
        # In a user's loop, no phase names the forward pass.
        part = "compute" if phase == "" and "forward" not in phases else _PART_OF.get(phase, "rest")
        parts_s[part] += seconds
    if unsynchronised := costs.get("unsynchronised_step_s"):
        # No phase shows the waits within a backward pass. Steps without gradient exchange save those waits and the
        # phases of gradient exchanges: all exchange phases except those that these steps have too.
        hidden = step_s - sum(unsynchronised) / len(unsynchronised)
        other_s = sum(seconds for phase, seconds in costs["unsynchronised_phase_s"].items() if phase in EXCHANGES)
        waits_s = min(max(hidden - (parts_s["communication"] - other_s), 0.0), parts_s["compute"])
        parts_s["compute"] -= waits_s
        parts_s["communication"] += waits_s
    parts_s["rest"] += step_s - sum(parts_s.values())
    return {part: max(0.0, round(seconds, 9)) for part, seconds in parts_s.items()}  # less is rounding


def _likeness(series: Series, base: Series, tolerance: float | None) -> dict[str, Any]:
    """Compare the models of two variants with the same global batch."""
    if series.batch != base.batch:
        return {}
    a, b = series.record.losses, base.record.losses
    gap = max((curve.gap(a[step], b[step]) for step in sorted(a.keys() & b.keys())[: measured.COMPARED]), default=None)
    configs = [side.cell.config for side in (series, base)]
    precisions = {"" if config is None else config.precision.name for config in configs}
    # If options that define the model vary, different losses are expected.
    if gap is None or len(precisions) > 1 or not series.cell.options.keys().isdisjoint(IDENTITY):
        return {"loss_gap": gap}
    if tolerance is None:
        tolerance = 0.0 if configs[1] is None else curve.default_tolerance(configs[1])
    another = f"its losses differ by {gap:.1e}{_cause(series, base)}" if gap > tolerance else ""
    names = {config.parallel.exchange for config in configs if config is not None}
    if not another and len(names) > 1 and (by_design := names & {*UNSCALED}):
        another = f"--exchange {' and '.join(sorted(by_design))}: other weights, however small the first difference"
    if (parts := series.batch_parts) != (base_parts := base.batch_parts):  # even if first losses agree
        another = f"each {'replica' if parts[0] != base_parts[0] else 'micro-batch'} has its own batch statistics"
    return {"loss_gap": gap, "another": another, "same_model": not another}


def _cause(series: Series, base: Series) -> str:
    """Return why the losses of two variants differ, after a colon; "" if unknown."""
    undrawn, place = (
        next((str(costs[name]) for costs in (series.trial.results, base.trial.results) if costs.get(name)), "")
        for name in ("undrawn", "first_draw")
    )
    if undrawn:
        return f": each rank draws its own random numbers, since those of one device failed ({undrawn.rstrip('.')})"
    if place and (parts := series.draw_parts) != (base_parts := base.draw_parts):
        part = "replica in a process" if parts[0] != base_parts[0] else "micro-batch"
        return f": each {part} draws its own random numbers; the first: {place}"
    return ""


def _trained(series: Series, target: float | None) -> dict[str, Any]:
    if not series.trainings:
        return {}
    runs = [training.results for training in series.trainings.values() if not training.failed]
    ends, reached = ([run["evals"][-1] for run in runs if run[kind]] for kind in ("evals", "reached"))
    fields: dict[str, Any] = {
        "seeds": len(runs),
        "accuracy": numbers.spread([scores[ACCURACY] for scores in ends]),
        "trained_s": numbers.spread([run["train_s"] for run in runs]),
        "trained_epoch_s": numbers.spread([statistics.fmean(run["epoch_s"]) for run in runs if run["epoch_s"]]),
        "reached": None if target is None else len(reached),
        "to_accuracy_steps": numbers.spread([scores[STEP] for scores in reached]),
        "to_accuracy_s": numbers.spread([scores[SECONDS] for scores in reached]),
    }
    for seed, training in series.trainings.items():
        fields |= {"failed": f"training with seed {seed} failed: {training.failed}"} if training.failed else {}
    proved = "; ".join(dict.fromkeys(run["proved"] for run in runs if run.get("proved")))
    return fields | ({"proved": proved} if proved else {})


def difference(row: Row, other: Row, column: int, *, reached: bool = False) -> Interval:
    """Return the mean difference of last evaluations, in `SECONDS` or `ACCURACY`.

    Over the seeds of both or, with `reached`, those for which both reached the accuracy.
    """
    kind = "reached" if reached else "evals"
    values, other_values = (
        {
            seed: trial.results["evals"][-1][column]
            for seed, trial in side.series.trainings.items()
            if trial.results.get(kind)
        }
        for side in (row, other)
    )
    return numbers.mean([value - other_values[seed] for seed, value in values.items() if seed in other_values])


def of_runs(runs: Sequence[Run]) -> list[Row]:
    """Return one row per run, without intervals, since each speed was measured once."""
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
