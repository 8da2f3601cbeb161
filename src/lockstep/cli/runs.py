"""`lockstep runs [FOLDER]`: the runs of a folder as a table, and a report of several."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import folders
from ..compare import listed
from ..compare.listed import Listed
from ..errors import RequestError
from ..screen import Screen, line
from . import compare, output, words

_USAGE = """\
usage: lockstep runs [FOLDER] [--open]

Lists the runs below FOLDER (default: runs): when and where, the options in which they differ, what they came to.

  --open    make a report of those that have ended, as lockstep compare --from does, and open it in a browser
"""
_WIDE = 160


def main(given: list[str]) -> int:
    """Print the table, and return 0."""
    if output.helped(given, _USAGE):
        return 0
    asked, leading = words.take(given, {"--open": bool})
    if len(leading) > 1 or any(word.startswith("-") for word in leading):
        raise RequestError(f"lockstep runs takes one folder, found {' '.join(leading)!r}.")
    folder = Path(leading[0]) if leading else folders.RUNS
    if not folder.is_dir():
        raise RequestError(f"{folder} is no folder; give the one that has runs.")
    found = listed.runs(folder)
    if not found:
        raise RequestError(f"{folder} has no runs.")
    with output.written():
        screen = Screen()
        if not screen.is_terminal:
            screen.width = _WIDE
        screen.print(_table(found))
        for run in found:
            if run.trouble:
                screen.say((f"{run.name}: {run.trouble}", "dim"))
    if asked.get("--open"):
        ended = [run for run in found if run.samples_per_s]
        page = compare.report_of([run.folder for run in ended], None)
        webbrowser.open(page.resolve().as_uri())
    return 0


def _table(found: Sequence[Listed]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("run", "when", "host", "what differs"):
        table.add_column(title, overflow="fold")
    for title in ("accuracy", "samples/s", "state"):
        table.add_column(title, justify="right")
    for run, differ in zip(found, listed.differing(found), strict=True):
        told = " ".join(f"{key}={_short(value)}" for key, value in differ.items())
        table.add_row(
            line(run.name),
            line(run.date[:16].replace("T", " ")),
            line(run.host),
            line(told),
            "" if run.accuracy is None else f"{run.accuracy:.2%}",
            "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}",
            line(run.state),
        )
    return table


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
