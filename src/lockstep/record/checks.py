"""Results of a run's checks: "proof" in `summary.json` and, readable, in `proof.md`.

A run writes its checks when it ends (`record.manifest`); later commands add theirs (`add`).
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
OF_THE_MODEL = frozenset(("gradients", "curve"))  # checks that hold at any step of a run
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
    tolerance: str = ""  # up to which values count as equal: "bit for bit", "exactly", "1e-09 relative"
    found: str = ""  # the result, or why nothing was checked, as a sentence without its full stop
    at_step: int | None = None  # the last optimizer step checked, for a claim about steps
    cost_s: float | None = None  # on rank 0; None if not measured

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


def from_json(proof: Any) -> list[Check]:
    """Return the checks of "proof" in a `summary.json`. Skip unknown fields of newer versions, and invalid checks."""
    checks = []
    for fields in proof.values() if isinstance(proof, dict) else ():
        values = {key: fields[key] for key in _KINDS if key in fields} if isinstance(fields, dict) else {}
        has_types = all(type(value) in _KINDS[key] for key, value in values.items())
        if has_types and values.keys() >= {"name", "claim", "outcome"} and math.isfinite(values.get("cost_s") or 0):
            checks.append(Check(**values))
    return checks


def by_name(checks: Iterable[Check]) -> dict[str, dict[str, Any]]:
    """Return the checks in the form of "proof" in `summary.json`."""
    return {check.name: dataclasses.asdict(check) for check in checks}


def sheet(title: str, checks: Sequence[Check]) -> str:
    """Return the checks as a page of Markdown."""
    failed = sum(check.fails for check in checks)
    judged = failed + sum(check.outcome == Check.HOLDS for check in checks)
    holding = "it holds" if judged == 1 else "all hold"
    verdict = f"{failed} {'is' if failed == 1 else 'are'} wrong" if failed else holding
    rows = [
        f"| {_cell(check.claim)} | **{_cell(check.outcome)}** | {check.times:,} | {_cell(check.tolerance) or '–'} | "
        f"{'–' if check.cost_s is None else f'{check.cost_s:.2f} s'} |"
        for check in checks
    ]
    lines = [
        *(f"# Proofs for {_cell(title)}", ""),
        *(f"{counted(judged, 'claim')} checked: {verdict}." if judged else "Nothing was checked.", ""),
        *("| what was checked | result | times | tolerance | cost |", "| --- | --- | --- | --- | --- |"),
        *rows,
        "",
        *(f"- **{_cell(c.name)}** ({_cell(c.outcome)}): {_cell(c.found)}." for c in checks if c.found),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    """Return `text` for a table cell: one line, with cell borders and HTML tags escaped."""
    return re.sub(r"([|<])", r"\\\1", one_line(text))


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the folder's summary.json, and a proof.md of its "proof"."""
    write_json(folder / SUMMARY, summary)
    page = sheet(folder.absolute().name, from_json(summary.get("proof")))
    write_whole(folder / SHEET, page.encode(errors="backslashreplace"))


def add(folder: Path, checks: Iterable[Check], **fields: Any) -> None:
    """Merge `checks` into the folder's summary.json and proof.md, and `fields` into the summary.

    A check replaces the one of its name. Raises OSError if the folder cannot be written, and ValueError if its
    summary.json is damaged.
    """
    path = folder / SUMMARY
    summary: dict[str, Any] = parse_json(read(path)) if os.path.lexists(path) else {}
    write(folder, summary | fields | {"proof": (summary.get("proof") or {}) | by_name(checks)})
