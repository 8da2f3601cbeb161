"""The report of a comparison: HTML, Markdown, JSON and SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import write_json, write_whole
from . import charts, tables
from .answer import TAKE
from .charts import Bar
from .numbers import CONFIDENCE
from .rows import PARTS, Row
from .tables import Column

HTML, MARKDOWN, JSON = "report.html", "report.md", "report.json"
COVERS = (
    f"ratio: of samples/s, to the reference variant; intervals of {CONFIDENCE:.0%} over all races; efficiency: to the "
    "same on one device, by the devices; steps: rank 0's; memory and processors: of all ranks; losses: the largest "
    "relative difference of the first steps; accuracy and training: mean ± sample standard deviation over the seeds, "
    "of the last evaluations and of the seconds of training steps; docs/compare.md defines each number"
)
COVERS_PAST = (
    "each run was measured once, on the machine and with the versions that its manifest.json names; ratio: of "
    "samples/s, to the first run on one device, else to the first; step times: over all steps of rank 0"
)
"""The scope of the numbers of runs that have ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report."""

    title: str
    about: str
    provenance: str  # date and command
    rows: Sequence[Row]
    answer: Sequence[str]
    covers: str = COVERS  # the scope of the numbers

    @property
    def measured(self) -> list[Row]:
        """The rows with numbers."""
        return [row for row in self.rows if row.samples_per_s is not None]


def _ms(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if (seconds := getattr(row, name)) is None else 1000 * seconds


def _part_ms(part: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        # Replicas in one process exchange within their computation.
        is_hidden = part == "communication" and row.ranks == 1 and row.devices > 1
        return None if is_hidden or not row.parts_s else 1000 * row.parts_s[part]

    return value


_VARIANT = Column("variant", "name")
_TABLES = {
    "Speed": (
        Column("samples/s", lambda row: row.samples_per_s and row.samples_per_s.middle, "{:,.0f}"),
        Column("ratio", "ratio", "{:.2f}"),
        Column("efficiency", "efficiency", "{:.0%}"),
        Column("step p50, ms", _ms("step_p50_s"), "{:.3g}"),
        Column("step p95, ms", _ms("step_p95_s"), "{:.3g}"),
        Column("epoch, s", "epoch_s", "{:.3g}"),
        Column("first step, s", "to_first_step_s", "{:.1f}"),
        Column("turns", lambda row: row.turns or None),
    ),
    "The model": (
        Column("losses", "loss_gap", lambda gap: f"{gap:.1e}" if gap else "the same"),
        Column("proved", "proved"),
        Column("accuracy", "accuracy", "{:.2%}"),
        Column("seeds", "seeds"),
        Column("reached", "reached"),
    ),
    "Whole trainings": (
        Column("training, s", "trained_s", "{:.3g}"),
        Column("its epoch, s", "trained_epoch_s", "{:.3g}"),
        Column("steps to accuracy", "to_accuracy_steps", "{:.4g}"),
        Column("s to accuracy", "to_accuracy_s", "{:.3g}"),
    ),
    "A mean step": (
        *(Column(f"{part}, ms", _part_ms(part), "{:.3g}") for part in PARTS),
        Column("TFLOP/s", "teraflops", "{:.3g}"),
        Column("of matrix rate", "matrix_share", "{:.1%}"),
        Column("bytes a step", "bytes_a_step", "{:,.0f}"),
    ),
    "Resources": (
        Column("host memory", "host_memory_bytes", tables.gib),
        Column("device memory", "device_memory_bytes", tables.gib),
        Column("processors busy", "busy_processors", "{:.2f}"),
        Column("GPUs busy", "busy_gpus", "{:.2f}"),
        Column("J a step", "joules_a_step", "{:.3g}"),
    ),
}
_COLUMNS = [_VARIANT, *(column for columns in _TABLES.values() for column in columns)]


def write(report: Report, folder: Path) -> list[str]:
    """Write the report's files into `folder` and return their names. Raises OSError."""
    drawings, rows = _charts(report.measured), [_as_json(row) for row in report.rows]
    texts = {
        HTML: _html(report, drawings),
        MARKDOWN: _markdown(report),
        **{f"{name}.svg": drawing for name, drawing in drawings.items()},
    }
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    head = {"title": report.title, "about": report.about, "made": report.provenance, "covers": report.covers}
    write_json(folder / JSON, head | {"answer": report.answer, "rows": rows})
    return [*texts, JSON]


def tables_of(report: Report) -> dict[str, list[Column]]:
    """Return {title: columns} of the report's tables, without empty columns."""
    filled = {title: tables.filled(columns, report.measured) for title, columns in _TABLES.items()}
    return {title: [_VARIANT, *columns] for title, columns in filled.items() if columns}


def _as_json(row: Row) -> dict[str, Any]:
    fields = {name: value for name, value in vars(row).items() if name != "series"}
    return {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in fields.items()}


def _html(report: Report, drawings: dict[str, str]) -> str:
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string((files(__package__) / "report.html.jinja").read_text("utf-8"))
    values = {"tables": tables_of(report), "charts": drawings, "confidence": CONFIDENCE, "take": TAKE}
    return template.render(report=report, **values)


def _markdown(report: Report) -> str:
    columns = tables.filled(_COLUMNS, report.measured)
    table = tables.markdown(columns, report.measured) if columns else []
    failed = [f"- {row.name}: {row.failed}" for row in report.rows if row.failed]
    head, foot = [[f"# {report.title}"], [report.about]], [[f"{report.covers}."], [report.provenance]]
    answer = [[f"{TAKE}`{line.removeprefix(TAKE)}`" if line.startswith(TAKE) else line] for line in report.answer]
    parts = [*head, *answer, table, failed, *foot]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _charts(rows: Sequence[Row]) -> dict[str, str]:
    """Return {name: drawing}, by the names in report.html.jinja."""
    rates = [Bar(row.name, {"samples/s": rate.middle}, rate) for row in rows if (rate := row.samples_per_s)]
    times = [Bar(row.name, {part: 1000 * s for part, s in row.parts_s.items()}) for row in rows if row.parts_s]
    drawings = {"throughput": ("Throughput", rates, "samples/s"), "time": ("Where a step's time goes", times, "ms")}
    return {name: charts.bars(*drawing) for name, drawing in drawings.items() if drawing[1]}
