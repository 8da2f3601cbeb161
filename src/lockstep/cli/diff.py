"""`lockstep diff A B`: how two checkpoints differ, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ProofError, RequestError, counted
from ..screen import Screen, line
from . import flags, output

if TYPE_CHECKING:
    from torch import Tensor

    from ..checks.difference import Difference

_ROWS = 5


def main(words: list[str]) -> int:
    """Print the differences; return 0 for none. Raises `ProofError` if they differ."""
    options, paths = flags.take(words, {"--tolerance": float, "--all": bool}, prog="lockstep diff")
    if unknown := [word for word in paths if word.startswith("-")]:
        raise RequestError(f"lockstep diff has no flag {unknown[0]}; lockstep diff --help shows those that it has.")
    if len(paths) != 2:
        raise RequestError(
            f"lockstep diff compares two checkpoints, found {len(paths)}; as in lockstep diff runs/a runs/b."
        )
    # Imported late, since it takes seconds: an invalid request is refused at once.
    from ..checkpoint import foreign
    from ..checks import difference

    tolerance, most = options.get("--tolerance", 0.0), None if "--all" in options else _ROWS
    a, b, left_out = _comparable(*(foreign.read(Path(path)) for path in paths))
    comparison = difference.compare(a, b)
    beyond, verdict = comparison.beyond(tolerance), comparison.verdict(tolerance)
    is_same = not beyond and not comparison.only_a and not comparison.only_b
    with output.written():
        screen = Screen()
        for side, names in (("A", comparison.only_a), ("B", comparison.only_b)):
            if names:
                ellipsis = f" … and {len(names) - _ROWS} more (--all)" if most and len(names) > _ROWS else ""
                screen.print(line((f"only in {side}", "bold"), f": {', '.join(names[:most])}{ellipsis}"))
        if beyond:
            screen.table(("", "largest difference", "relative", "ULPs", "elements that differ"), _rows(beyond, most))
        if left_out:
            screen.say((left_out, "dim"))
        if is_same:
            screen.say(verdict)
    if not is_same:
        raise ProofError(f"{paths[0]} and {paths[1]} are not the same. {verdict}")
    return 0


def _comparable(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Return the comparable parts of both, and a note on the rest. Weights alone are compared with weights."""
    parts_a, parts_b = ({name.partition("/")[0] for name in side} for side in (a, b))
    if parts_a == parts_b or {"model"} not in (parts_a, parts_b):
        return a, b, ""
    side, state = ("A", a) if parts_b == {"model"} else ("B", b)
    parts = Counter(name.partition("/")[0] for name in state if not name.startswith("model/"))
    listed = ", ".join(f"{part} ({counted(count, 'tensor')})" for part, count in sorted(parts.items()))
    a, b = ({name: tensor for name, tensor in tensors.items() if name.startswith("model/")} for tensors in (a, b))
    return a, b, f"not compared, since only {side} has more than weights: {listed}"


def _rows(differences: Sequence[Difference], most: int | None) -> Iterator[tuple[str, ...]]:
    """Yield the first `most` rows of each kind; the kind with the largest difference comes first."""
    for kind, count in Counter(difference.kind for difference in differences).items():
        shown = [difference for difference in differences if difference.kind == kind][:most]
        first = f", the first {len(shown)} (--all)" if count > len(shown) else ""
        yield f"{kind}: {counted(count, 'tensor')}{first}", "", "", "", ""
        for row in shown:
            size = f"{row.absolute:.3g}" if row.differing else "0, other bits"
            size += f" ({row.dtypes})" if row.dtypes else ""
            ulps = "" if row.ulps is None else f"{row.ulps:,}" if row.ulps < 10**7 else f"{row.ulps:.1e}"
            numbers = (size, f"{row.relative:.2g}", ulps, f"{row.differing:,} of {row.elements:,}")
            yield f"  {row.name}", *((row.shapes, "", "", "") if row.shapes else numbers)
