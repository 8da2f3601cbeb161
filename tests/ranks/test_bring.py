"""Loops that people bring: the plain loop's numbers on any number of ranks, or one sentence that refuses."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from ..bring import catalogue, generate
from ..bring.catalogue import REFUSED, RIGHT, SKIPPED, Case
from ..bring.program import draw, dumps, loads
from ..bring.runner import Runner
from ..pool import RankPool

CASES = catalogue.cases()
SEED, QUICK, LONG = 1, 25, 200
"""Generated programs: of this seed, so many in each tier."""


@pytest.fixture(scope="module")
def ranks(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Ranks that run loops."""
    return Runner(pool, tmp_path_factory.mktemp("runs"))


def tiered(case: Case, *parameters: object, is_long: bool = False) -> Any:
    """Return a parameter set; what is not quick runs in the long tier."""
    marks = [pytest.mark.long] if is_long or not case.quick else []
    return pytest.param(case, *parameters, marks=marks, id="-".join(map(str, (case, *parameters))))


RUNS = [
    tiered(case, size, accumulate, is_long=size != 2)
    for case, size, accumulate in product(CASES.values(), (1, 2, 3), (1, 2))
    if case.allowed(size, accumulate) & ~SKIPPED
]
RESUMED = [tiered(case, is_long=True) for case in CASES.values() if case.resumed & ~SKIPPED]


@pytest.mark.parametrize(("case", "size", "accumulate"), RUNS)
def test_a_loop_comes_to_the_plain_numbers_or_is_refused(ranks: Runner, case: Case, size: int, accumulate: int) -> None:
    result = ranks.observe(case, size, accumulate)
    assert result.outcome & case.allowed(size, accumulate), result


@pytest.mark.parametrize("case", RESUMED)
def test_a_killed_loop_resumes_with_the_same_bits(ranks: Runner, case: Case) -> None:
    result = ranks.resume_case(case, 2)
    assert result.outcome & (case.resumed | SKIPPED), result


def numbered(count: int, start: int = 0, **marks: Any) -> list[Any]:
    return [pytest.param(number, id=f"{SEED}:{number}", **marks) for number in range(start, count)]


@pytest.mark.parametrize("number", [*numbered(QUICK), *numbered(LONG, QUICK, marks=pytest.mark.long)])
def test_a_generated_loop_comes_to_the_same_numbers_on_any_ranks(ranks: Runner, number: int) -> None:
    program = draw(SEED, number)
    size = generate.resumed_size(number) if number >= QUICK else 0
    finding = generate.observe(ranks, program, resumed_size=size)
    assert finding.outcome & (RIGHT | REFUSED | SKIPPED), (finding, dumps(program))


def test_a_program_is_read_as_it_was_written() -> None:
    for number in range(50):
        assert loads(dumps(draw(SEED, number))) == draw(SEED, number)
