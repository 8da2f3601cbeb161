"""Loops that people bring: the plain loop's numbers on any number of ranks, or one sentence that refuses."""

from __future__ import annotations

from itertools import product

import pytest

from ..bring import catalogue, generate
from ..bring.catalogue import REFUSED, RIGHT, SKIPPED, Case
from ..bring.evaluation import UNEVEN
from ..bring.program import draw, dumps, loads
from ..bring.runner import Runner
from ..pool import RankPool

CASES = catalogue.cases()
SEED, QUICK, SLOW = 1, 10, 60
"""Generated programs of this seed; `python -m tests.bring.generate` draws as many as wanted."""


@pytest.fixture(scope="module")
def ranks(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Ranks that run loops."""
    return Runner(pool, tmp_path_factory.mktemp("runs"))


def _marks(case: Case, size: int, accumulate: int) -> list[pytest.MarkDecorator]:
    if not case.quick or size != 2:
        return [pytest.mark.slow]
    return [pytest.mark.long] if accumulate > 1 else []


RUNS = [
    pytest.param(*run, id=f"{run[0]}-{run[1]}-{run[2]}", marks=_marks(*run))
    for run in product(CASES.values(), (1, 2, 3), (1, 2))
    if run[0].allowed(*run[1:]) & ~SKIPPED
]


@pytest.mark.parametrize(("case", "size", "accumulate"), RUNS)
def test_a_loop_comes_to_the_plain_numbers_or_is_refused(ranks: Runner, case: Case, size: int, accumulate: int) -> None:
    result = ranks.observe(case, size, accumulate)
    assert result.outcome & (case.allowed(size, accumulate) | SKIPPED), result


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES.values() if case.resumed & ~SKIPPED], ids=str)
def test_each_loop_is_resumed_as_expected(ranks: Runner, case: Case) -> None:
    result = ranks.resume_case(case, 2)
    assert result.outcome & (case.resumed | SKIPPED), result


@pytest.mark.parametrize(
    ("name", "every"),
    [("code_after_an_evaluation-schedule", 3), ("same_batch_again-twice", 3), ("second_loader-outliving", 2)],
)
def test_a_loop_that_is_killed_resumes_to_the_same_bits(ranks: Runner, name: str, every: int) -> None:
    assert ranks.resume((name,), 2, way="error", checkpoint_every=every).outcome == RIGHT


@pytest.mark.parametrize("how", UNEVEN)
def test_calls_that_differ_are_named(ranks: Runner, how: str) -> None:
    result = ranks.observe(CASES[f"uneven_calls-{how}"], 2, 1)
    assert result.outcome == REFUSED, result
    assert all(words in result.message for words in UNEVEN[how]), result.message


def test_a_gradient_that_is_not_there_yet_is_explained(ranks: Runner) -> None:
    assert "`if session.is_last`" in ranks.observe(CASES["change_gradients-decay"], 2, 2).message


PROGRAMS = [
    pytest.param(number, marks=[pytest.mark.slow] * (number >= QUICK or draw(SEED, number).workers > 0))
    for number in range(SLOW)
]


@pytest.mark.parametrize("number", PROGRAMS)
def test_a_generated_loop_comes_to_the_same_numbers_on_any_ranks(ranks: Runner, number: int) -> None:
    program = draw(SEED, number)
    finding = generate.observe(ranks, program, resumed_size=0 if number < QUICK else generate.resumed_size(number))
    assert finding.outcome & (RIGHT | REFUSED | SKIPPED), (finding, dumps(program))


def test_a_program_is_read_as_it_was_written() -> None:
    for number in range(50):
        assert loads(dumps(draw(SEED, number))) == draw(SEED, number)
