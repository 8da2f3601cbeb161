"""The sentences of all errors, in one file that shows each change of words: `python -m tests.unit.test_sentences`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import lockstep
from lockstep import errors

from ..command import ROOT

APPROVED = ROOT / "tests" / "golden" / "sentences.txt"
SOURCE = Path(lockstep.__file__).parent
NAMES = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.LockstepError)}


def _template(node: ast.expr) -> str:
    """Return the text of a string or f-string, with {} for its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_template, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _sentences() -> Iterator[str]:
    """Yield FILE: TEMPLATE of each error that is made with words."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in NAMES and node.args:
                template = _template(node.args[0])
                if len(template.split()) > 1:
                    yield f"{path.relative_to(SOURCE)}: {template!r}"


def _text() -> str:
    return "".join(f"{line}\n" for line in sorted(_sentences()))


def test_the_sentences_are_those_that_were_approved() -> None:
    assert _text().splitlines() == APPROVED.read_text().splitlines()


if __name__ == "__main__":
    APPROVED.write_text(_text())
