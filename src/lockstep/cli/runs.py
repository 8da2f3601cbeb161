"""`lockstep runs`: the runs of a folder as a table."""

from __future__ import annotations

from pathlib import Path

from ..compare import records
from ..errors import RequestError
from ..runs import folders
from ..screen import Screen
from . import flags, output

_HEADS = ("run", "when", "host", "what differs", "accuracy", "samples/s", "state")


def main(words: list[str]) -> int:
    """Print the table, and return 0."""
    _, names = flags.take(words, {}, prog="lockstep runs")
    parents = [*map(Path, names)] or [folders.RUNS]
    for folder in parents:
        if not folder.is_dir():
            raise RequestError(f"{folder} is not a folder; give folders that have runs.")
    runs = [run for folder in parents for run in records.below(folder)]
    reports = sorted(page for folder in parents for page in folder.glob("*/report.html"))
    if not runs and not reports:
        raise RequestError(f"There are no runs in {', '.join(map(str, parents))}.")
    rows = []
    for run, options in zip(runs, records.differing(runs), strict=True):
        values = [",".join(map(str, value)) if isinstance(value, list) else value for value in options.values()]
        top1, rate, date = run.summary.get("top1"), run.samples_per_s, str(run.manifest.get("date", ""))
        rows.append(
            [
                *(run.name, date[:16].replace("T", " "), str(run.manifest.get("host", ""))),
                " ".join(f"{key}={value}" for key, value in zip(options, values, strict=True)),
                "" if top1 is None else f"{top1:.2%}",
                "" if rate is None else f"{rate:,.0f}",
                run.state,
            ]
        )
    with output.written():
        screen = Screen()
        if rows:
            screen.table(_HEADS, rows, texts=4)
        for run in runs:
            if run.trouble:
                screen.say((f"{run.name}: {run.trouble}", "dim"))
        for page in reports:
            screen.say((f"comparison: {page}", "dim"))
    return 0
