"""The report of a comparison: HTML, Markdown, JSON, CSV and SVG."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import write_json, write_whole
from . import charts, tables
from .charts import Bar, Line
from .numbers import CONFIDENCE
from .rows import PARTS, Row, accuracy_curve
from .tables import Column

HTML, MARKDOWN, JSON, CSV = "report.html", "report.md", "report.json", "report.csv"
STEP_TIMES = "step p50 and p95: of all timed steps of rank 0; data to rest: parts of the mean step, in ms"
COVERS = (
    "ratio: of samples/s, to the first variant on one device, else to the first that is its model; both with "
    f"{CONFIDENCE:.0%} intervals over all races; efficiency: of samples/s, to the same on one device, by the devices; "
    f"{STEP_TIMES}; memory and processors: the sum over all ranks; losses: the largest "
    "relative difference of the first steps; accuracy and training: mean ± sample standard deviation over the seeds, "
    "of the last evaluations, and of the seconds of training steps alone, without starts, evaluations and checkpoints"
)
COVERS_PAST = (
    "each run was measured once, on the machine and with the versions that its manifest.json names; ratio: of "
    "samples/s, to the first run on one device, else to the first; step times: over all steps of rank 0"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report."""

    title: str
    about: str
    made: str
    rows: Sequence[Row]
    answer: Sequence[str]
    is_past: bool = False  # whether it is on runs that have ended, which were not measured side by side

    @property
    def whole(self) -> list[Row]:
        """The rows with numbers."""
        return [row for row in self.rows if row.samples_per_s is not None]

    @property
    def covers(self) -> str:
        """The scope of the numbers."""
        return COVERS_PAST if self.is_past else COVERS


def _ms(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if (seconds := getattr(row, name)) is None else 1000 * seconds


def _part_ms(part: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        # Replicas in one process exchange within their computation.
        is_hidden = part == "communication" and row.ranks == 1 and row.devices > 1
        return None if is_hidden or not row.parts_s else 1000 * row.parts_s[part]

    return value


def _over_seeds(head: str, name: str, text: str) -> Column:
    return Column(head, name, text, head, (f"{head} sd",))


_VARIANT = Column("variant", "name", brief="variant")
_TRAINED = (
    _over_seeds("accuracy", "accuracy", "{:.2%}"),
    _over_seeds("training, s", "trained_s", "{:.3g}"),
    _over_seeds("its epoch, s", "trained_epoch_s", "{:.3g}"),
    Column("seeds", "seeds", brief="seeds"),
    Column("reached", "reached", brief="reached"),
    _over_seeds("steps to accuracy", "to_accuracy_steps", "{:.4g}"),
    _over_seeds("s to accuracy", "to_accuracy_s", "{:.3g}"),
)
_COLUMNS = (
    Column("samples/s", lambda row: row.samples_per_s and row.samples_per_s.middle, "{:,.0f}", "samples/s"),
    Column("ratio", "ratio", "{:.2f}", "ratio", ("low", "high")),
    Column("efficiency", "efficiency", "{:.0%}", "efficiency"),
    *_TRAINED,
    Column("step p50, ms", _ms("step_p50_s"), "{:.3g}", "p50 ms"),
    Column("step p95, ms", _ms("step_p95_s"), "{:.3g}", "p95 ms"),
    Column("epoch, s", "epoch_s", "{:.3g}"),
    *(Column(f"{part}, ms", _part_ms(part), "{:.3g}", part) for part in PARTS),
    Column("TFLOP/s", "teraflops", "{:.3g}"),
    Column("of matrix rate", "matrix_share", "{:.1%}"),
    Column("bytes a step", "bytes_a_step", "{:,.0f}"),
    Column("host memory", "host_memory_bytes", tables.gib, "memory"),
    Column("device memory", "device_memory_bytes", tables.gib, "on devices"),
    Column("processors busy", "busy_processors", "{:.2f}"),
    Column("GPUs busy", "busy_gpus", "{:.2f}"),
    Column("J a step", "joules_a_step", "{:.3g}"),
    Column("first step, s", "to_first_step_s", "{:.1f}", "first step"),
    Column("losses", "loss_gap", lambda gap: f"{gap:.1e}" if gap else "the same", "losses"),
    Column("proved", "proved", brief="proved"),
    Column("turns", lambda row: row.turns or None),
)
_CSV = (_VARIANT, Column("flags", lambda row: " ".join(row.flags)), *_COLUMNS, Column("failed", "failed"))


def write(report: Report, folder: Path) -> list[str]:
    """Write the report's files into `folder` and return their names. Raises OSError."""
    drawn = _charts(report.whole)
    columns = tables.filled((_VARIANT, *_COLUMNS), report.whole)
    named = {
        HTML: _html(report, columns, drawn),
        MARKDOWN: _markdown(report, columns),
        CSV: tables.as_csv(_CSV, report.rows),
        **{f"{name}.svg": svg for name, svg in drawn.items()},
    }
    for name, text in named.items():
        write_whole(folder / name, text.encode())
    told = {key: getattr(report, key) for key in ("title", "about", "made", "covers", "answer")}
    write_json(folder / JSON, told | {"rows": [_as_json(row) for row in report.rows]})
    return [*named, JSON]


def console(report: Report) -> list[tuple[list[str], list[list[str]]]]:
    """Return the console's tables: measurements, and whole trainings."""
    measured = [each for each in _COLUMNS if each.brief and each not in _TRAINED]
    kept = [[_VARIANT, *tables.filled(columns, report.whole)] for columns in (measured, _TRAINED)]
    return [([each.brief for each in columns], tables.cells(columns, report.whole)) for columns in kept if columns[1:]]


def _as_json(row: Row) -> dict[str, Any]:
    kept = {name: each for name, each in vars(row).items() if name not in ("series", "record")}
    return {name: each._asdict() if hasattr(each, "_asdict") else each for name, each in kept.items()}


def _html(report: Report, columns: Sequence[Column], drawn: Mapping[str, str]) -> str:
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string((files(__package__) / "report.html.jinja").read_text("utf-8"))
    differ = [(row.name, " ".join(_differing(row, report.rows[0])), row.failed) for row in report.rows]
    return template.render(report=report, columns=columns, differ=differ, charts=drawn, confidence=CONFIDENCE)


def _differing(row: Row, first: Row) -> list[str]:
    """Return the row's flags that the first row lacks. Of the first row, all."""
    mine, its = ([*re.findall(r"--\S+(?: (?!--)\S+)*", " ".join(each.flags))] for each in (row, first))
    return mine if row is first else [each for each in mine if each not in its]


def _markdown(report: Report, columns: Sequence[Column]) -> str:
    table = tables.markdown(columns, report.whole) if columns else []
    failed = [f"- {row.name}: {row.failed}" for row in report.rows if row.failed]
    parts = [[f"# {report.title}"], [report.about], report.answer, table, failed, [f"{report.covers}."], [report.made]]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _charts(rows: Sequence[Row]) -> dict[str, str]:
    """Return {name: drawing}, by the names in report.html.jinja."""
    rates = [Bar(row.name, {"samples/s": rate.middle}, rate) for row in rows if (rate := row.samples_per_s)]
    times = [Bar(row.name, {part: 1000 * max(0.0, each) for part, each in row.parts_s.items()}) for row in rows]
    held = [Bar(row.name, {"GiB": (row.device_memory_bytes or row.host_memory_bytes or 0.0) / 2**30}) for row in rows]
    losses = [Line(row.name, [*row.record.losses.items()]) for row in rows]
    accuracy = [Line(row.name, [(x, 100 * y) for x, y in accuracy_curve(row)]) for row in rows]
    found = {
        "throughput": charts.bars("Throughput", rates, "samples/s"),
        "time": charts.bars("Where a step's time goes", times, "ms"),
        "scaling": charts.lines("Scaling", _scaling(rows), "devices", "×", ideal=True),
        "memory": charts.bars("Memory", held, "GiB"),
        "losses": charts.lines("Losses", losses, "step", "loss"),
        "accuracy": charts.lines("Accuracy", accuracy, "seconds of training", "%"),
        "utilisation": charts.lines("Utilisation", [Line(row.name, row.record.busy) for row in rows], "seconds", "%"),
    }
    return {name: svg for name, svg in found.items() if svg}


def _scaling(rows: Sequence[Row]) -> list[Line]:
    """Return speed-up by devices, a line for each set of other options."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in rows if len({row.devices for row in rows}) > 1 else ():
        if row.devices > 1 and row.speed_up is not None:
            name = re.sub(r"--devices \d+ ?", "", " ".join(row.flags)).strip()
            groups.setdefault(name or "devices", [(1.0, 1.0)]).append((row.devices, row.speed_up.middle))
    return [Line(name, sorted(points)) for name, points in groups.items()]
