"""The answer to "is it the same gradient?": each strategy in each case, what differs, and why."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import own
from ..batching import BatchPlan
from ..config import RunConfig
from ..errors import RequestError
from ..kinds import KINDS
from ..proof import Check
from ..verify.digest import compare
from ..world import World
from . import causes, float64
from .cases import Case
from .causes import Cause
from .gaps import beyond, gaps, worst
from .gradients import Workbench


@dataclass(frozen=True)
class Row:
    """One batch under one strategy."""

    case: str
    split: str
    """How the batch is shared out, in words."""
    gap: float
    """Largest relative difference of any tensor's gradient from one process's."""
    tensors: dict[str, float]
    """The gaps beyond the tolerance, the largest first."""


@dataclass(frozen=True)
class Answer:
    """What came of one strategy."""

    strategy: str
    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    unused: tuple[str, ...]
    """Parameters that the loss does not reach on some rank, under a strategy that refuses that."""
    unlike: Mapping[str, frozenset[int]]
    """Parameters whose gradients were not the same bits on all ranks after the exchange, and the ranks that deviate:
    all where no more than half agree."""
    by_design: str
    """Why a difference is no fault, where that is known: the strategy, which nobody asked for, or the model says so."""

    @property
    def agrees(self) -> bool:
        """Whether the gradients are one process's, and can be had."""
        return not (self.causes or self.unused or self.differs)

    @property
    def differs(self) -> bool:
        """Whether a gradient is not one process's, or not the same on all ranks."""
        return bool(self.unlike) or any(row.tensors for row in self.rows)

    @property
    def fails(self) -> bool:
        """Whether something differs that should not."""
        return not self.agrees and not self.by_design


@dataclass(frozen=True)
class Report:
    """What `examine` found, on rank 0."""

    precision: str
    tolerance: float
    replicas: int
    answers: tuple[Answer, ...]
    cost_s: float

    def check(self) -> Check:
        """Return the report as a claim of the run's proof."""
        failing = [each for each in self.answers if each.fails]
        found = "; ".join(in_words(each) for each in self.answers)
        return Check(
            name="gradients",
            claim=f"{self.replicas} replicas compute the gradient of one process, in {self.precision}, but for what is "
            "so by design",
            outcome=Check.FAILS if failing else Check.HOLDS,
            times=sum(len(each.rows) for each in self.answers),
            tolerance=f"{self.tolerance:g} relative",
            found=found,
            cost_s=self.cost_s,
        )


def in_words(answer: Answer) -> str:
    """Return a clause that says what came of a strategy."""
    largest = max((row.gap for row in answer.rows), default=0.0)
    if answer.agrees:
        return f"{answer.strategy} agrees within {largest:.1e}"
    names = [cause.name for cause in answer.causes]
    why = ", ".join([*names, *["unused parameters"] * bool(answer.unused), *["ranks differ"] * bool(answer.unlike)])
    if answer.by_design:
        rest = max(cause.rest for cause in answer.causes)
        return f"{answer.strategy} differs by {largest:.1e} by design ({why}), and agrees within {rest:.1e} without"
    if answer.differs:
        return f"{answer.strategy} differs by {largest:.1e} ({why})"
    return f"{answer.strategy} agrees within {largest:.1e}, but has unused parameters, which training refuses"


def strategies(asked: str) -> list[str]:
    """Return the strategies with several replicas that are measured where `asked` was asked for.

    Raises `RequestError` for the one with a single replica, which is what the others are measured against.
    """
    several = [name for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all]
    if asked not in ("auto", *several):
        raise RequestError(
            f"--strategy {asked} has one replica, which is what others are measured against; give "
            f"{' or '.join(several)}, or none for all of them."
        )
    # Ranks that have a device each are no ranks that drive several: those are measured where they are asked for.
    return [name for name in several if not KINDS[name].has_two_levels] if asked == "auto" else [asked]


def examine(config: RunConfig, world: World, names: list[str], tolerance: float, step: str = "") -> Report | None:
    """Return what comes of the strategies `names`, on rank 0 (*collective*).

    `config` names the strategy that the world's ranks use, and `step`, as module:attribute, a training step of the
    user's own. Raises `RequestError` for a model that cannot run in the config's precision, or too few samples.
    """
    begun_s = time.perf_counter()
    bench = None
    own_step = own.load("--step", step) if step else None
    try:
        bench = Workbench(config, world, own_step)
        answers = [_answer(bench, name, tolerance, alone=len(names) == 1) for name in names]
    except (RequestError, RuntimeError) as error:
        float64.check(config, world, error, own_step)
        raise
    finally:
        if bench is not None:
            bench.close()
    cost_s = time.perf_counter() - begun_s
    return Report(config.precision.name, tolerance, bench.replicas, tuple(answers), cost_s) if world.is_main else None


def _answer(bench: Workbench, strategy: str, tolerance: float, *, alone: bool) -> Answer:
    """Return what comes of one strategy (*collective*); `alone` says that it was asked for by name."""
    has_ranks = KINDS[strategy].has_ranks
    found = bench.cases
    rows: list[Row] = []
    unlike: dict[str, frozenset[int]] = {}
    for case in found:
        theirs = bench.under(strategy, case)
        if has_ranks:
            for each in compare(bench.world, theirs):
                unlike[each.name] = unlike.get(each.name, frozenset()) | {*each.ranks}
        gap = gaps(theirs, bench.reference(case))
        rows.append(Row(case.name, _split(case, bench.replicas), worst(gap), beyond(gap, tolerance)))
    causes_found: dict[tuple[str, str], Cause] = {}
    failing = bench.world.gather([bool(row.tensors) for row in rows])[0]
    for case, fails in zip(found, failing, strict=True):
        if fails:
            for cause in causes.find(bench, strategy, case, tolerance):
                before = causes_found.get(key := (cause.name, cause.sentence))
                causes_found[key] = cause if before is None else before.merged(cause)
    lacking = bench.unused if has_ranks and not bench.config.parallel.find_unused else []
    return Answer(
        strategy=strategy,
        rows=tuple(rows),
        causes=tuple(causes_found.values()),
        unused=tuple(lacking),
        unlike=unlike,
        by_design=_by_design(bench, strategy, [*causes_found.values()], bool(lacking or unlike), alone=alone),
    )


def _by_design(bench: Workbench, strategy: str, found: Sequence[Cause], faulty: bool, *, alone: bool) -> str:
    """Return why the causes found are no fault; "" where one is."""
    if faulty or not found:
        return ""
    reasons = []
    for cause in found:
        if cause.by_law:
            reasons.append("the model's own randomness is drawn by each rank for itself")
        elif cause.name == causes.LOCAL and not alone and not bench.job(strategy).strategy.can_sync_batchnorm:
            reasons.append(f"each replica has batch statistics of its own under {strategy}: another model")
        else:
            return ""
    return "; ".join(reasons)


def _split(case: Case, replicas: int) -> str:
    """Return how a batch is shared out: `64 = 32 + 32`."""
    plan = BatchPlan(global_size=case.size, ranks=replicas, accumulation=case.accumulation)
    micros = [
        " + ".join(str(len(plan.split(case.start, case.stop, rank)[number])) for rank in range(replicas))
        for number in range(plan.micros(case.size))
    ]
    shown = micros[0] if len(micros) == 1 else " + ".join(f"({each})" for each in micros)
    return f"{case.size} = {shown}" if len(shown) <= 32 else f"{case.size} samples"
