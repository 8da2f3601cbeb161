"""Forecast step times on N devices from one rank's share. The cluster is described (docs/forecast.md).

Each share is measured alone in two separate processes (`measured.measure_share`); shares in between are interpolated;
`timeline` computes the step of N such ranks. Error bars have 90 % confidence: they combine the differences between
processes and the uncertainty of the links as independent errors.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RequestError, RunError
from ..files import write_json, write_whole
from ..record.console import duration
from ..verify import commands
from . import charts, networks, numbers, records, tables, timeline, traffic, trials
from .grid import Words
from .networks import Links
from .numbers import Interval
from .records import Record
from .tables import Column
from .timeline import FREE, Link, Network
from .traffic import Profile

_PASSES, _MOST_MEASURED = 2, 5
USUAL_S, LIMIT_S = 20.0, 600.0  # of a measurement: usual time (a start and four seconds of steps), and limit
_DOUBTFUL = 1.5  # ratio of step times between processes above which measurements are doubted
_MOST_EFFICIENT = 1.1  # efficiency above which measurements are doubted
_FACTORS = (1e-4, 1e4)  # limits of the factor between a fitted link and its base
LOSSES = ("smaller shares", "the slowest rank", "the network's rate", "the network's latency")
"""Causes of a speed-up below N on N devices."""
JSON, MARKDOWN, SVG = "forecast.json", "forecast.md", "scaling.svg"


class Share(NamedTuple):
    """Measured steps of the first of `ranks` ranks."""

    ranks: int
    profile: Profile
    process_s: tuple[float, ...]  # a mean step, of each process
    memory_bytes: float  # peak of a rank: of its GPU, else of its process


class Job(NamedTuple):
    """Facts about the job that do not depend on devices; None for unknown numbers."""

    batch: int
    steps_per_epoch: int | None
    epochs: int | None
    on_gpu: bool


class Cluster(NamedTuple):
    """The devices and links that would run the job; `price` is of a device and hour."""

    between: Links
    within: Links
    per_node: int
    price: float | None = None

    def network(self, quality: int, *, has_trees: bool) -> Network:
        """Return the network: worst (0), middle (1) or best (2)."""
        between, within = self.between[quality], self.within[quality]
        return Network(between=between, within=within, per_node=self.per_node, has_trees=has_trees)


class Forecast(NamedTuple):
    """Step time, speed-up and cost on `devices` devices."""

    devices: int
    share: int
    step_s: Interval
    speed_up: Interval  # of samples a second, over one device
    samples_per_s: float
    epoch_s: float | None
    cost: float | None  # of the whole run, in the price's unit
    memory_bytes: float  # of a device
    bytes_a_step: int  # that a device sends, as a mean over devices and steps
    losses_s: dict[str, float]  # of a step, by `LOSSES`: with an N-th of one device's step they sum to it
    dp_speed_up: float | None  # under dp instead; None if impossible

    @property
    def efficiency(self) -> float | None:
        """Speed-up per device; None if implausibly high."""
        ratio = self.speed_up.middle / self.devices
        return ratio if ratio <= _MOST_EFFICIENT else None

    @property
    def limit(self) -> str:
        """The largest loss; "" where all are small."""
        name, seconds = max(self.losses_s.items(), key=lambda loss: loss[1], default=("", 0.0))
        return name if seconds > 0.02 * self.step_s.middle else ""


COLUMNS = (
    Column("devices", "devices", "{:,}"),
    Column("share", "share", "{:,}"),
    Column("step, ms (90 %)", lambda row: row.step_s.times(1000), tables.brief),
    Column("samples/s", "samples_per_s", "{:,.0f}"),
    Column("speed-up (90 %)", "speed_up", tables.brief),
    Column("efficiency", "efficiency", "{:.0%}"),
    Column("epoch, s", "epoch_s", tables.brief),
    Column("memory", "memory_bytes", tables.gib),
    Column("bytes a step", "bytes_a_step", "{:,}"),
    Column("cost", "cost", "{:,.2f}"),
    Column("dp", "dp_speed_up", "{:.3g}"),
    Column("limited by", "limit"),
)


def chosen(devices: Sequence[int], batch: int | None) -> list[int]:
    """Choose the numbers of devices to measure: one, and four others evenly.

    Numbers that give the same share of the global `batch` are measured once.
    """
    by_share = {ranks if batch is None else math.ceil(batch / ranks): ranks for ranks in reversed(devices) if ranks > 1}
    candidates = sorted(by_share.values())
    number = min(_MOST_MEASURED - 1, len(candidates))
    return [1, *(candidates[round(index)] for index in np.linspace(0, len(candidates) - 1, number))]


def measure(
    ranks: Sequence[int], command: Callable[[int, Path], Words], folder: Path, notify: Callable[[str], None]
) -> tuple[list[Share], Job]:
    """Measure the shares that `folder` lacks, and return all.

    `command(ranks, folder)` returns the words that train one rank's share into a run's folder. Raises `RunError` if a
    share fails.
    """
    measurements: dict[int, list[dict[str, Any]]] = {size: [] for size in ranks}
    record = Record()
    pending = missing(ranks, folder)
    usual_s = USUAL_S
    for number, size in itertools.product(range(1, _PASSES + 1), ranks):
        path = _path(folder, size, number)
        if is_missing := path in pending:
            remaining = duration(len(pending) * usual_s)
            notify(f"measuring a rank's share of {size} ({number} of {_PASSES}), about {remaining} left")
            pending.remove(path)
        words = ("compare", "share", str(size), *command(size, path / trials.RUN))
        trial = trials.once(f"share of {size}", path, words, limit_s=LIMIT_S)
        usual_s = trial.seconds if is_missing else usual_s
        if trial.failed:
            raise RunError(f"A rank's share of {size} cannot be measured: {trial.failed}")
        measurements[size].append(trial.results)
        record = record if record.start else records.record(path / trials.RUN)
        if not record.plan:
            raise RunError(
                "The loop has no loader that lockstep shares out, so that nothing tells a rank's share of a batch."
            )
    job = Job(
        batch=int(record.plan["global_size"]),
        steps_per_epoch=record.start["steps_per_epoch"] or None,
        epochs=record.start["epochs"] or None,
        on_gpu=measurements[ranks[0]][0]["peak_memory_bytes"]["device"] is not None,
    )
    return [share(size, job.batch, measurements[size]) for size in ranks], job


def missing(ranks: Sequence[int], folder: Path) -> list[Path]:
    """Return the folders of the missing measurements."""
    paths = (_path(folder, size, number) for size in ranks for number in range(1, _PASSES + 1))
    return [path for path in paths if trials.done(path) is None]


def _path(folder: Path, ranks: int, number: int) -> Path:
    return folder / f"share-{ranks}-{number}"


def gloo(folder: Path) -> Links:
    """Measure gloo between two ranks of this machine, once per folder."""
    paths = [folder / f"gloo-{number}.json" for number in (1, 2)]
    words = ("--json", "--devices", "2", "--accelerator", "cpu", "--collectives", "gloo")
    command = commands.python("lockstep", "doctor", *words)
    for path in paths:
        if not path.exists():
            done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
            if not done.stdout:
                raise RunError(
                    f"lockstep doctor --devices 2 has failed: {done.stderr.decode(errors='replace').strip()}"
                )
            write_whole(path, done.stdout)
    return networks.examined(paths)


def doubts(shares: Sequence[Share], rows: Sequence[Forecast]) -> list[str]:
    """Return the signs that other programs disturbed the measurements."""
    ratio = max(max(share.process_s) / min(share.process_s) for share in shares)
    best = max(row.speed_up.middle / row.devices for row in rows)
    signs = []
    if ratio >= _DOUBTFUL:
        signs.append(f"The same steps took {ratio:.1f} times as long in one process as in another")
    if best > _MOST_EFFICIENT:
        signs.append(
            f"Shares were up to {best:.1f} times as fast per sample as the whole batch on one device, and the table "
            "leaves such efficiencies out"
        )
    advice = "other programs disturbed the measurement. Measure again with another --output when they have ended."
    return [f"{sign}: {advice}" for sign in signs]


def share(ranks: int, batch: int, costs: Sequence[dict[str, Any]]) -> Share:
    """Merge several processes' measurements of one share.

    Raises `RunError` if their steps differ.
    """
    profiles = [Profile.of(math.ceil(batch / ranks), cost["profile"]) for cost in costs]
    if any(profile.points != profiles[0].points for profile in profiles):
        raise RunError("The job's steps are not the same from one process to the next: there is no step to forecast.")
    means = tuple(statistics.fmean(cost["step_s"]) for cost in costs)
    # Recording the points takes time: a step's duration is that of the unrecorded steps.
    scaled = [
        profile.scaled(mean_s / profile.step_s, profile.batch) for profile, mean_s in zip(profiles, means, strict=True)
    ]
    memory_bytes = max(peak["device"] or peak["host"] for peak in (cost["peak_memory_bytes"] for cost in costs))
    profile = replace(profiles[0], seconds=np.concatenate([profile.seconds for profile in scaled]))
    return Share(ranks, profile, means, memory_bytes)


def fitted(cluster: Cluster, share: Share, step_s: Sequence[float], *, has_trees: bool) -> Links:
    """Fit the links between nodes to a recorded run's step times.

    The run had the share's ranks. The middle link fits the median of `step_s`, the others its 95 % and 5 % quantiles.
    Raises `RequestError` if the run was faster than its computation alone is here.
    """
    alone_s, middle_s = timeline.step_s(share.profile, share.ranks, FREE), statistics.median(step_s)
    if middle_s <= alone_s:
        raise RequestError(
            f"A step of that run took {1000 * middle_s:.3g} ms, and its computation alone takes "
            f"{1000 * alone_s:.3g} ms here: it ran on faster devices, and says nothing about their links; measure "
            "those with lockstep doctor."
        )
    base = cluster.network(1, has_trees=has_trees)

    def link(seconds: float) -> Link:
        low, high = _FACTORS
        while high > 1.001 * low:
            factor = math.sqrt(low * high)
            network = replace(base, between=base.between.slower(factor))
            is_slower = timeline.step_s(share.profile, share.ranks, network) > seconds
            low, high = (low, factor) if is_slower else (factor, high)
        return base.between.slower(low)

    slow_s, fast_s = map(float, np.quantile(step_s, (0.95, 0.05)))
    return Links(link(max(slow_s, middle_s)), link(middle_s), link(min(fast_s, middle_s)))


def forecast(shares: Sequence[Share], job: Job, cluster: Cluster, devices: Sequence[int]) -> list[Forecast]:
    """Return one row per number of devices."""
    error = numbers.of_next([share.process_s for share in shares])
    return [_row(shares, job, cluster, count, error) for count in devices]


def _row(shares: Sequence[Share], job: Job, cluster: Cluster, devices: int, error: float) -> Forecast:
    one_s = shares[0].profile.step_s
    profile, memory_bytes = _interpolated(shares, devices, math.ceil(job.batch / devices))
    worst, middle, best = (cluster.network(quality, has_trees=job.on_gpu) for quality in range(3))
    slow_s, step_s, fast_s = (timeline.step_s(profile, devices, network) for network in (worst, middle, best))
    # Errors of times multiply: the factor is the same for longer and shorter.
    longer_s = math.hypot(slow_s - step_s, error * profile.step_s)
    shorter_s = math.hypot(step_s - fast_s, error / (1 + error) * profile.step_s)
    times = Interval(step_s, step_s - min(shorter_s, 0.99 * step_s), step_s + longer_s)
    epoch_s = None if job.steps_per_epoch is None else job.steps_per_epoch * step_s
    cost = None
    if cluster.price is not None and epoch_s is not None and job.epochs is not None:
        cost = devices * cluster.price * epoch_s * job.epochs / 3600
    speed_up, losses_s, dp_speed_up = Interval(1.0, 1.0, 1.0), {}, None
    if devices > 1:
        one_error = math.log1p(error)  # of the time on one device
        factors = (times.high / step_s, step_s / times.low)
        less, greater = (math.exp(math.hypot(math.log(factor), one_error)) for factor in factors)
        speed_up = Interval(one_s / step_s, one_s / step_s / less, one_s / step_s * greater)
        # Each stage adds one cause to the ideal step.
        free_s, instant_s = (timeline.step_s(profile, devices, network) for network in (FREE, middle.instant()))
        stages = [one_s / devices, profile.step_s, free_s, instant_s, step_s]
        # A difference below a nanosecond is rounding; + 0.0 turns -0.0 into 0.0.
        losses_s = {name: round(b - a, 9) + 0.0 for name, a, b in zip(LOSSES, stages, stages[1:], strict=False)}
        if job.on_gpu and devices <= cluster.per_node:
            dp_speed_up = one_s / timeline.data_parallel_s(profile, devices, middle)
    rate, bytes_a_step = job.batch / step_s, round(traffic.bytes_a_step(profile, devices))
    sizes = (epoch_s, cost, traffic.memory_bytes(profile, devices, memory_bytes), bytes_a_step)
    return Forecast(devices, profile.batch, times, speed_up, rate, *sizes, losses_s, dp_speed_up)


def _interpolated(shares: Sequence[Share], devices: int, batch: int) -> tuple[Profile, float]:
    """Interpolate the profile and memory of a rank with `batch` samples."""
    one, *parts = shares
    if devices == 1 or not parts:
        return one.profile, one.memory_bytes
    by_size = {part.profile.batch: part for part in reversed(parts)}
    sizes = sorted(by_size)
    measurements = [(by_size[size].profile.step_s, by_size[size].memory_bytes) for size in sizes]
    step_s, memory_bytes = (float(np.interp(batch, sizes, values)) for values in zip(*measurements, strict=True))
    above = by_size[min((size for size in sizes if size >= batch), default=sizes[-1])]
    return above.profile.scaled(step_s / above.profile.step_s, batch), memory_bytes


def sentences(rows: Sequence[Forecast], unit: str) -> list[str]:
    """Return the speed-ups in words; `unit` is the name of a device."""
    return [
        f"{row.devices} {unit}s: {row.speed_up.middle:.3g}× ({row.speed_up.low:.3g}–{row.speed_up.high:.3g})"
        f"{row.limit and f', limited by {row.limit}'}."
        for row in rows
        if row.devices > 1
    ]


def write(folder: Path, forecasts: Sequence[Forecast], answer: Sequence[str], about: str, provenance: str) -> list[str]:
    """Write the forecast as JSON, Markdown and chart; return their names."""
    rows = [row._asdict() | {"efficiency": row.efficiency, "limit": row.limit} for row in forecasts]
    rows = [row | {key: row[key]._asdict() for key in ("step_s", "speed_up")} for row in rows]
    table = tables.markdown(tables.filled(COLUMNS, forecasts), forecasts)
    text = [f"# Forecast: {about}", "", *(f"- {sentence}" for sentence in answer), "", *table, "", provenance]
    bars = [charts.Bar(f"{row.devices:,}", {"speed-up": row.speed_up.middle}, row.speed_up) for row in forecasts]
    write_json(folder / JSON, {"about": about, "made": provenance, "answer": list(answer), "rows": rows})
    write_whole(folder / MARKDOWN, ("\n".join(text) + "\n").encode())
    write_whole(folder / SVG, charts.bars("Speed-up by devices", bars, "× as fast").encode())
    return [JSON, MARKDOWN, SVG]
