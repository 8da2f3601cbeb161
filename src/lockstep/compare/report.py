"""The report of a comparison: one HTML file without network, the same as Markdown, JSON and CSV, its charts as SVG."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import legal, write_json, write_whole
from . import charts
from .charts import Bar, Line
from .numbers import CONFIDENCE, Spread
from .rows import PARTS, Row

HTML, MARKDOWN, JSON, CSV = "report.html", "report.md", "report.json", "report.csv"
COVERS = (
    "ratio: of samples/s, to the first variant on one device, else to the first that is its model; both with "
    f"{CONFIDENCE:.0%} intervals over all races; efficiency: of samples/s, to the same on one device, by the devices; "
    "step times: over all timed steps of rank 0; memory and processors: the sum over all ranks; losses: the largest "
    "relative difference of the first steps"
)
COVERS_PAST = (
    "each run was measured once, on the machine and with the versions that its manifest.json names; ratio: of "
    "samples/s, to the first run on one device, else to the first; step times: over all steps of rank 0"
)
COVERS_TRAINED = (
    "accuracy and training: mean ± sample standard deviation over the seeds, of the last evaluations, and of the "
    "seconds of training steps alone, without starts, evaluations and checkpoints"
)
_POINTS = 400
"""Of a curve, that a report draws."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report tells."""

    title: str
    about: str
    made: str
    rows: Sequence[Row]
    answer: Sequence[str]
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By variant, of each step."""
    busy: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By variant, (seconds since its start, percent of a processor or of the GPUs)."""

    accuracy: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """By variant, (seconds of training, accuracy) of its evaluations, means over its seeds."""
    is_past: bool = False
    """Whether it is on runs that have ended, which nobody measured side by side."""

    @property
    def covers(self) -> str:
        """What the numbers cover."""
        if self.is_past:
            return COVERS_PAST
        return f"{COVERS}; {COVERS_TRAINED}" if any(row.seeds for row in self.rows) else COVERS

    @property
    def whole(self) -> list[Row]:
        """The rows that have numbers."""
        return [row for row in self.rows if row.samples_per_s is not None]


@dataclass(frozen=True)
class _Column:
    head: str
    value: Callable[[Row], float | str | None]
    text: Callable[[Any], str]
    sd: Callable[[Row], float | None] | None = None
    """Where the value is a mean that has one."""


def _over_seeds(head: str, name: str, text: Callable[[Any], str]) -> _Column:
    def of(part: str, row: Row) -> float | None:
        spread: Spread | None = getattr(row, name)
        return None if spread is None else getattr(spread, part)

    return _Column(head, partial(of, "mean"), text, partial(of, "sd"))


def _gibibytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def _known(row: Row) -> Any:
    return row.ratio if row.ratio is not None and row.ratio.low > 0 else None


def _part_ms(part: str, row: Row) -> float | None:
    return 1000 * row.parts_s[part] if row.parts_s and row.tells(part) else None


_TRAINED = (
    _over_seeds("accuracy", "accuracy", "{:.2%}".format),
    _over_seeds("training, s", "trained_s", "{:.3g}".format),
    _over_seeds("its epoch, s", "trained_epoch_s", "{:.3g}".format),
    _Column("seeds", lambda row: row.seeds, "{:.0f}".format),
    _Column("reached", lambda row: row.reached, "{:.0f}".format),
    _over_seeds("steps to accuracy", "to_accuracy_steps", "{:.4g}".format),
    _over_seeds("s to accuracy", "to_accuracy_s", "{:.3g}".format),
)
_COLUMNS = (
    _Column("samples/s", lambda row: row.samples_per_s and row.samples_per_s.middle, "{:,.0f}".format),
    _Column("ratio", lambda row: row.ratio and row.ratio.middle, "{:.2f}".format),
    _Column("low", lambda row: _known(row) and _known(row).low, "{:.2f}".format),
    _Column("high", lambda row: _known(row) and _known(row).high, "{:.2f}".format),
    _Column("efficiency", lambda row: row.efficiency, "{:.0%}".format),
    *_TRAINED,
    _Column("step p50, ms", lambda row: row.step_p50_s and 1000 * row.step_p50_s, "{:.3g}".format),
    _Column("step p95, ms", lambda row: row.step_p95_s and 1000 * row.step_p95_s, "{:.3g}".format),
    _Column("epoch, s", lambda row: row.epoch_s, "{:.3g}".format),
    *(_Column(f"{part}, ms", partial(_part_ms, part), "{:.3g}".format) for part in PARTS),
    _Column("TFLOP/s", lambda row: row.teraflops, "{:.3g}".format),
    _Column("of matrix rate", lambda row: row.matrix_share, "{:.1%}".format),
    _Column("bytes a step", lambda row: row.bytes_a_step, "{:,.0f}".format),
    _Column("host memory", lambda row: row.host_memory_bytes, _gibibytes),
    _Column("device memory", lambda row: row.device_memory_bytes, _gibibytes),
    _Column("processors busy", lambda row: row.busy_processors, "{:.2f}".format),
    _Column("GPUs busy", lambda row: row.busy_gpus, "{:.2f}".format),
    _Column("J a step", lambda row: row.joules_a_step, "{:.3g}".format),
    _Column("first step, s", lambda row: row.to_first_step_s, "{:.1f}".format),
    _Column("losses", lambda row: row.loss_gap, lambda gap: "the same" if gap == 0 else f"{gap:.1e}"),
    _Column("proved", lambda row: row.proved or None, str),
    _Column("turns", lambda row: row.turns or None, "{:.0f}".format),
)


def write(report: Report, folder: Path) -> list[str]:
    """Write the report's files into `folder` and return their names. Raises OSError."""
    drawn = _charts(report)
    for name, chart in drawn.items():
        write_whole(folder / f"{name}.svg", chart["svg"].encode())
    write_whole(folder / HTML, _html(report, list(drawn.values())).encode())
    write_whole(folder / MARKDOWN, _markdown(report).encode())
    write_whole(folder / CSV, _csv(report).encode())
    write_json(folder / JSON, as_json(report))
    return [HTML, MARKDOWN, JSON, CSV, *(f"{name}.svg" for name in drawn)]


def over_seeds(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return, by title, what whole trainings have told of each row; empty where there were none."""
    if not any(row.seeds or row.accuracy for row in rows):
        return {}
    told = {column.head: [_shown(column, row) for row in rows] for column in _TRAINED}
    return {head: cells for head, cells in told.items() if any(cells)}


def as_json(report: Report) -> dict[str, Any]:
    """Return all numbers of the report."""
    rows = []
    for row in report.rows:
        found = dataclasses.asdict(row)
        rows.append(legal({key: each._asdict() if hasattr(each, "_asdict") else each for key, each in found.items()}))
    told = {"title": report.title, "about": report.about, "made": report.made, "covers": report.covers}
    return {**told, "answer": list(report.answer), "rows": rows}


def _html(report: Report, drawn: Sequence[Mapping[str, str]]) -> str:
    from jinja2 import Environment

    template = files(__package__).joinpath("report.html.jinja").read_text("utf-8")
    columns = _filled(report)
    table = [
        {
            "cells": [
                {"key": None, "text": row.name},
                *({"key": _number(column, row), "text": _shown(column, row)} for column in columns),
            ]
        }
        for row in report.whole
    ]
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=report.title,
            about=report.about,
            made=report.made,
            answer=report.answer,
            covers=report.covers,
            heads=["variant", *(column.head for column in columns)],
            table=table,
            failed=[(row.name, row.failed) for row in report.rows if row.failed],
            charts=drawn,
            configs=_configs(report.rows),
        )
    )


def _configs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the first one's options, and of the others those that are not the first one's."""
    told: list[list[str]] = []
    for row in rows:
        options: list[str] = []
        for word in row.flags:
            options += [word] if word.startswith("--") else [f"{options.pop()} {word}"]
        told.append(options)
    return [
        (row.name, " ".join(each for each in mine if mine is told[0] or each not in told[0]))
        for row, mine in zip(rows, told, strict=True)
    ]


def _filled(report: Report) -> list[_Column]:
    """Return the columns of which any variant has a number: what could not be measured is blank, or not there."""
    return [each for each in _COLUMNS if any(each.value(row) is not None for row in report.whole)]


def _number(column: _Column, row: Row) -> float | None:
    value = column.value(row)
    return None if isinstance(value, str) else value


def _shown(column: _Column, row: Row) -> str:
    value = column.value(row)
    sd = None if column.sd is None else column.sd(row)
    return "" if value is None else column.text(value) + ("" if sd is None else f" ± {column.text(sd)}")


def _markdown(report: Report) -> str:
    columns = _filled(report)
    heads = ["variant", *(column.head for column in columns)]
    told = [f"# {report.title}", "", report.about, "", *report.answer, ""]
    told += [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * len(columns)}"]
    for row in report.whole:
        cells = [row.name, *(_shown(column, row) for column in columns)]
        told.append(f"| {' | '.join(re.sub(r'[|<>]', ' ', cell) for cell in cells)} |")
    told += [
        "",
        *(f"- {row.name}: {row.failed}" for row in report.rows if row.failed),
        "",
        f"{report.covers}.",
        "",
        report.made,
    ]
    return "\n".join(told) + "\n"


def _csv(report: Report) -> str:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    columns = [each for column in _COLUMNS for each in (column, _deviation(column)) if each is not None]
    out.writerow(["variant", "flags", *(column.head for column in columns), "failed"])
    for row in report.rows:
        values = ["" if (value := column.value(row)) is None else str(value) for column in columns]
        out.writerow([row.name, " ".join(row.flags), *values, row.failed])
    return text.getvalue()


def _deviation(column: _Column) -> _Column | None:
    return None if column.sd is None else _Column(f"{column.head} sd", column.sd, column.text)


def _charts(report: Report) -> dict[str, dict[str, str]]:
    """Return {file name: title, drawing and caption} of what there is to draw."""
    rows = report.whole
    timed = [_time(row) for row in rows if row.parts_s]
    found = {
        "throughput": (
            "Throughput",
            charts.bars("Throughput", [_rate(row) for row in rows], "samples/s") if rows else "",
            f"Samples a second; the line on a bar is the interval that holds it with {CONFIDENCE:.0%}.",
        ),
        "time": (
            "Where a step's time goes",
            charts.bars("Where a step's time goes", timed, "ms") if timed else "",
            "A mean step. Communication is what no computation hides; the parts sum to the step.",
        ),
        "scaling": (
            "Scaling",
            _scaling(rows),
            "Speed over the same on one device; dashed: as many times as fast as there are devices.",
        ),
        "memory": (
            "Memory",
            charts.bars("Memory", held, "GiB") if (held := [_memory(row) for row in rows if _held(row)]) else "",
            "The most that all ranks held together: tensors on GPUs where there are some, else all of the processes.",
        ),
        "losses": (
            "Losses",
            charts.lines(
                "Losses",
                [Line(name, _thin(list(enumerate(each, 1)))) for name, each in report.losses.items() if each],
                "step",
                "loss",
            ),
            "Of the global batch, by optimizer step: the same model has one curve.",
        ),
        "accuracy": (
            "Accuracy",
            charts.lines(
                "Accuracy",
                [Line(name, [(x, 100 * y) for x, y in each]) for name, each in report.accuracy.items() if each],
                "seconds of training",
                "%",
            ),
            "Of each evaluation: the mean over the seeds, as long as all of them were trained.",
        ),
        "utilisation": (
            "Utilisation",
            charts.lines(
                "Utilisation",
                [Line(name, _thin(each)) for name, each in report.busy.items() if len(each) > 1],
                "seconds since the start",
                "%",
            ),
            "Rank 0's process (100 % is one processor), or its GPUs.",
        ),
    }
    return {
        name: {"title": title, "svg": svg, "caption": caption} for name, (title, svg, caption) in found.items() if svg
    }


def _rate(row: Row) -> Bar:
    rate = row.samples_per_s
    assert rate is not None
    known = rate.low > 0
    return Bar(
        row.name,
        {"samples/s": rate.middle},
        f"{rate.middle:,.0f}",
        rate.low if known else None,
        rate.high if known else None,
    )


def _time(row: Row) -> Bar:
    parts = {part: 1000 * max(0.0, row.parts_s.get(part, 0.0)) for part in PARTS}
    return Bar(row.name, parts, f"{sum(parts.values()):.3g} ms")


def _held(row: Row) -> float:
    return row.device_memory_bytes or row.host_memory_bytes or 0.0


def _memory(row: Row) -> Bar:
    held = _held(row) / 2**30
    return Bar(row.name, {"memory": held}, f"{held:.2f} GiB")


def _scaling(rows: Sequence[Row]) -> str:
    """Return the speed by devices, a line for each set of other options; "" where all have as many."""
    if len({row.devices for row in rows}) < 2:
        return ""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.devices > 1 and row.speed_up is not None:
            name = re.sub(r"--devices \d+ ?", "", " ".join(row.flags)).strip()
            groups.setdefault(name or "devices", [(1.0, 1.0)]).append((row.devices, row.speed_up.middle))
    return charts.lines(
        "Scaling", [Line(name, sorted(points)) for name, points in groups.items()], "devices", "×", ideal=True
    )


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // _POINTS)
    return [*points[::every], *points[-1:]] if points else []
