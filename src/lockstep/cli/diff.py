"""`lockstep diff A B`: how two checkpoints differ, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..errors import ProofError, RequestError, counted
from ..screen import Screen, line
from . import output, words

if TYPE_CHECKING:
    from torch import Tensor

    from ..checks.difference import Difference

_USAGE = """\
usage: lockstep diff A B [--tolerance T] [--all]

A and B are runs or checkpoints of ours, safetensors files, or what torch.save wrote of tensors (a pickle of anything
else is refused). Wrappers' prefixes (module., _orig_mod.) are taken off the names.

Prints which tensors only one of them has, and of the others the largest difference: absolute, relative to the tensor's
largest value, and in ULPs (how many floating-point numbers lie between). Where one side holds nothing but weights, only
the weights are compared.

  --tolerance T   take tensors whose relative difference is at most T for the same (default: 0, the same bits)
  --all           print all rows, not the first 5 of a kind

Exit code: 0 the same, 3 different, 2 where they cannot be compared.
"""
_ROWS = 5
_WIDE = 200
"""Columns where the output is no terminal: names stay whole for whoever searches them."""


def main(given: list[str]) -> int:
    """Print how the two differ; return 0 where they are the same, raise `ProofError` where they are not."""
    if output.helped(given, _USAGE):
        return 0
    asked = _parsed(given)
    # Imported late, as it takes seconds: what is asked for wrongly is refused at once.
    from ..checkpoint import foreign
    from ..checks import difference

    a, b = (foreign.read(path) for path in asked.paths)
    a, b, left_out = _comparable(a, b)
    found = difference.compare(a, b)
    beyond = found.beyond(asked.tolerance)
    verdict = found.verdict(asked.tolerance)
    is_same = not beyond and not found.only_a and not found.only_b
    with output.written():
        screen = Screen()
        if not screen.is_terminal:
            screen.width = _WIDE
        for side, names in (("A", found.only_a), ("B", found.only_b)):
            _print_names(screen, f"only in {side}", names, most=len(names) if asked.all else _ROWS)
        if beyond:
            screen.print(_table(beyond, len(beyond) if asked.all else _ROWS))
        for note in left_out:
            screen.say((note, "dim"))
        if is_same:
            screen.say(verdict)
    if not is_same:
        raise ProofError(f"{asked.paths[0]} and {asked.paths[1]} are not the same. {verdict}")
    return 0


@dataclass(frozen=True)
class _Asked:
    paths: tuple[Path, Path]
    tolerance: float
    all: bool


def _parsed(given: list[str]) -> _Asked:
    own, rest = words.take(given, {"--tolerance": float, "--all": bool})
    if strange := [word for word in rest if word.startswith("-")]:
        raise RequestError(f"lockstep diff has no flag {strange[0]}; lockstep diff --help shows those that it has.")
    if len(rest) != 2:
        raise RequestError(
            f"lockstep diff compares two checkpoints, found {len(rest)}; as in lockstep diff runs/a runs/b."
        )
    return _Asked((Path(rest[0]), Path(rest[1])), own.get("--tolerance", 0.0), own.get("--all", False))


def _comparable(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return the parts that are compared, and what is said of the others: weights alone are compared with weights."""
    parts_a, parts_b = ({name.partition("/")[0] for name in side} for side in (a, b))
    if parts_a == parts_b or {"model"} not in (parts_a, parts_b):
        return a, b, []
    side, whole = ("A", a) if parts_b == {"model"} else ("B", b)
    others = Counter(name.partition("/")[0] for name in whole if not name.startswith("model/"))
    said = ", ".join(f"{part} ({counted(count, 'tensor')})" for part, count in sorted(others.items()))
    weights = [{name: each for name, each in found.items() if name.startswith("model/")} for found in (a, b)]
    return weights[0], weights[1], [f"not compared, since only {side} has more than weights: {said}"]


def _print_names(screen: Screen, title: str, names: Sequence[str], *, most: int) -> None:
    if names:
        more = f" … and {len(names) - most} more (--all)" if len(names) > most else ""
        screen.print(line((title, "bold"), f": {', '.join(names[:most])}{more}"))


def _table(rows: Sequence[Difference], most: int) -> Table:
    """Return the first `most` rows of each kind: first the kind with the largest difference."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for title in ("largest difference", "relative", "ULPs", "elements that differ"):
        table.add_column(title, justify="right")
    for kind, count in Counter(each.kind for each in rows).items():
        shown = [each for each in rows if each.kind == kind][:most]
        first = f", the first {len(shown)} (--all)" if count > len(shown) else ""
        table.add_row(line((kind, "bold"), f": {counted(count, 'tensor')}{first}"))
        for each in shown:
            table.add_row(line(f"  {each.name}"), *map(line, _cells(each)))
    return table


def _cells(each: Difference) -> tuple[str, str, str, str]:
    if each.shapes:
        return each.shapes, "", "", ""
    ulps = "" if each.ulps is None else f"{each.ulps:,}" if each.ulps < 10**7 else f"{each.ulps:.1e}"
    size = f"{each.absolute:.3g}" if each.differing else "0, other bits"
    if each.dtypes:
        size += f" ({each.dtypes})"
    return size, f"{each.relative:.2g}", ulps, f"{each.differing:,} of {each.elements:,}"
