"""Results of a run's checks. Each is a value: "proof" in `summary.json` and, readable, in `proof.md`.

A run writes its own checks when it ends (`record.manifest`); later commands add theirs (`add`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

from ..errors import counted
from ..files import parse_json, read, write_json, write_whole
from ..printable import one_line

SUMMARY, SHEET = "summary.json", "proof.md"
OF_THE_MODEL = frozenset(("gradients", "curve"))  # checks that hold however far a run has come
BIT_FOR_BIT = "bit for bit"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim about a run, and its outcome."""

    HOLDS: ClassVar[str] = "holds"
    FAILS: ClassVar[str] = "fails"
    OPEN: ClassVar[str] = "not checked"

    name: str  # its key in `summary.json`: replicas, samples, …
    claim: str  # a sentence without its full stop
    outcome: str  # HOLDS, FAILS or OPEN
    times: int = 0  # how often it was checked
    tolerance: str = ""  # up to which things count as the same: "bit for bit", "exactly", "1e-09 relative"
    found: str = ""  # what came out, or why nothing was checked, as a sentence without its full stop
    at_step: int | None = None  # the last optimizer step that was checked, where the claim is about steps
    cost_s: float | None = None  # on rank 0; None where that was not measured

    @property
    def fails(self) -> bool:
        """Whether the claim was checked and is wrong."""
        return self.outcome == self.FAILS


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "claim", "outcome", "tolerance", "found"), (str,)),
    "times": (int,),
    "at_step": (int, NoneType),
    "cost_s": (float, NoneType),
}


def from_json(held: Any) -> list[Check]:
    """Return the checks of "proof" in a `summary.json`. Skips unknown fields of newer versions, and invalid checks."""
    found = []
    for each in held.values() if isinstance(held, dict) else ():
        own = {key: each[key] for key in _KINDS if key in each} if isinstance(each, dict) else {}
        is_whole = own.keys() >= {"name", "claim", "outcome"} and all(type(own[key]) in _KINDS[key] for key in own)
        if is_whole and math.isfinite(own.get("cost_s") or 0):
            found.append(Check(**own))
    return found


def by_name(checks: Iterable[Check]) -> dict[str, dict[str, Any]]:
    """Return the checks in the form of "proof" in `summary.json`."""
    return {check.name: dataclasses.asdict(check) for check in checks}


def sheet(title: str, checks: Sequence[Check]) -> str:
    """Return the checks as a page of Markdown."""
    failed = sum(each.fails for each in checks)
    judged = failed + sum(each.outcome == Check.HOLDS for each in checks)
    verdict = f"{failed} {'is' if failed == 1 else 'are'} wrong" if failed else "all hold"
    rows = [
        f"| {_cell(each.claim)} | **{_cell(each.outcome)}** | {each.times:,} | {_cell(each.tolerance) or '–'} | "
        f"{'–' if each.cost_s is None else f'{each.cost_s:.2f} s'} |"
        for each in checks
    ]
    lines = [
        *(f"# What is proved of {_cell(title)}", ""),
        *(f"Of {counted(judged, 'claim')} checked, {verdict}." if judged else "Nothing was checked.", ""),
        *("| what was checked | result | times | tolerance | cost |", "| --- | --- | --- | --- | --- |"),
        *rows,
        "",
        *(f"- **{_cell(each.name)}** ({_cell(each.outcome)}): {_cell(each.found)}." for each in checks if each.found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    """Return a text for one table cell. One line, with cell borders and HTML tags escaped."""
    return re.sub(r"([|<])", r"\\\1", one_line(text))


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the folder's summary.json, and a proof.md of its "proof"."""
    write_json(folder / SUMMARY, summary)
    page = sheet(folder.absolute().name, from_json(summary.get("proof")))
    write_whole(folder / SHEET, page.encode(errors="backslashreplace"))


def add(folder: Path, checks: Iterable[Check], **more: Any) -> None:
    """Merge `checks` into the folder's summary.json and proof.md. Also the fields `more`, into the summary.

    A check replaces the one of its name. Raises OSError where the folder cannot be written, and ValueError where its
    summary.json is damaged.
    """
    path = folder / SUMMARY
    summary: dict[str, Any] = parse_json(read(path)) if os.path.lexists(path) else {}
    write(folder, summary | more | {"proof": (summary.get("proof") or {}) | by_name(checks)})
