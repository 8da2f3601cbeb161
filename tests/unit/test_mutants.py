"""The mutants still break the source as it is, and the tests that catch them are among those that `make test` runs."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from ..mutants import MUTANTS, ROOT, Mutant

TIERS = ("unit", "ranks", "faults", "real")


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1] == []
    assert len(MUTANTS) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_breaks_the_source_and_names_a_test(mutant: Mutant) -> None:
    compile(mutant.broken(ROOT / "src"), mutant.file, "exec")
    file, _, name = mutant.test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    (test,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name.partition("[")[0])
    assert file.partition("/")[0] in TIERS
    assert not any(re.search(r"mark\.(long|slow)", ast.unparse(mark)) for mark in (*test.decorator_list, *_marks(tree)))


def _marks(tree: ast.Module) -> list[ast.expr]:
    """Return what marks a whole file's tests."""
    assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
    return [each.value for each in assigned if any(ast.unparse(target) == "pytestmark" for target in each.targets)]
