"""Compare N ranks' gradients with one process's, for each strategy.

In float64 the two agree but for rounding, about 1e-15 of the largest gradient; a larger gap has a cause, which `causes`
finds.

    report = examine(config, world, strategies("auto"), tolerance=1e-9)
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from .. import user_code
from ..checks.digest import compare
from ..config.registry import KINDS
from ..config.schema import RunConfig
from ..errors import RequestError
from ..record.checks import Check
from ..world.world import World
from . import causes
from .causes import Cause
from .workbench import ONE, TOLERANCE, Workbench, beyond, gaps, worst

_OF_DTYPES = re.compile(r"dtype|scalar type|Float\b|Double\b|float64")
"""Matches the error that a model with float32 constants raises in float64."""


class Row(NamedTuple):
    """One batch under one strategy."""

    case: str  # the batch, in words
    gap: float  # largest relative difference of any tensor's gradient from one process's
    tensors: dict[str, float]  # the gaps beyond the tolerance, the largest first


@dataclass(frozen=True)
class Answer:
    """The result for one strategy."""

    strategy: str
    rows: tuple[Row, ...]
    causes: tuple[Cause, ...]
    differing: Mapping[str, frozenset[int]]
    """Parameters whose gradients differ in bits between ranks, and the ranks that deviate from the majority."""
    by_design: str  # why a difference is no fault; "" if it is one

    @property
    def agrees(self) -> bool:
        """Whether gradients equal one process's, on all ranks."""
        return not self.differing and not any(row.tensors for row in self.rows)

    @property
    def fails(self) -> bool:
        """Whether a difference is not by design."""
        return not self.agrees and not self.by_design

    def __str__(self) -> str:
        largest = f"{max((row.gap for row in self.rows), default=0.0):.1e}"
        if self.agrees:
            return f"{self.strategy} agrees within {largest}"
        names = ", ".join([*(cause.name for cause in self.causes), *["ranks differ"] * bool(self.differing)])
        if self.by_design:
            gap = max(cause.residual for cause in self.causes)
            return f"{self.strategy} differs by {largest} by design ({names}), and agrees within {gap:.1e} without"
        return f"{self.strategy} differs by {largest} ({names})"


@dataclass(frozen=True)
class Report:
    """The result of `examine`, on rank 0."""

    precision: str
    tolerance: float
    replicas: int
    answers: tuple[Answer, ...]
    cost_s: float

    def check(self) -> Check:
        """Return the report as a claim of the run's proof."""
        return Check(
            name="gradients",
            claim=f"{self.replicas} replicas compute the gradient of one process, in {self.precision}, but for what is "
            "so by design",
            outcome=Check.FAILS if any(answer.fails for answer in self.answers) else Check.HOLDS,
            times=sum(len(answer.rows) for answer in self.answers),
            tolerance=f"{self.tolerance:g} relative",
            found="; ".join(map(str, self.answers)),
            cost_s=self.cost_s,
        )


def strategies(requested: str) -> list[str]:
    """Return the strategies to measure for `asked`. Raises `RequestError` for a single replica.

    "auto" leaves out strategies whose ranks drive several devices each.
    """
    names = [name for name, kind in KINDS.items() if kind.has_ranks or kind.drives_all]
    if requested not in ("auto", *names):
        raise RequestError(
            f"--strategy {requested} has one replica, which is what others are measured against; give "
            f"{' or '.join(names)}, or none for all of them."
        )
    return (
        [name for name in names if not (KINDS[name].has_two_levels or KINDS[name].divides_state)]
        if requested == "auto"
        else [requested]
    )


def examine(config: RunConfig, world: World, names: list[str], tolerance: float, step: str = "") -> Report | None:
    """Measure the strategies `names`; return the report on rank 0 (*collective*).

    `config` names the strategy that the world's ranks use, and `step`, as module:attribute, a training step of the
    user's own. Raises `RequestError` for a model that cannot run in the config's precision, or too few samples.
    """
    begun_s = time.perf_counter()
    own_step = user_code.load("--step", step) if step else None
    try:
        with closing(Workbench(config, world, own_step)) as bench:
            answers = tuple(_answer(bench, name, tolerance, alone=len(names) == 1) for name in names)
    except (RequestError, RuntimeError) as error:
        if config.precision.name != "fp64" or not _OF_DTYPES.search(str(error)):
            raise
        raise RequestError(
            f"--model {config.model.name} cannot run in float64: {' '.join(str(error).split()).rstrip('.')}; verify it "
            f"with --precision fp32, whose tolerance is {TOLERANCE:g}."
        ) from error
    cost_s = time.perf_counter() - begun_s
    return Report(config.precision.name, tolerance, bench.replicas, answers, cost_s) if world.is_main else None


def _answer(bench: Workbench, strategy: str, tolerance: float, *, alone: bool) -> Answer:
    """Measure one strategy (*collective*). `alone`: the user requested it by name."""
    has_ranks, rows = KINDS[strategy].has_ranks, list[Row]()
    method = bench.job(strategy).method
    differing: dict[str, frozenset[int]] = {}
    for case in bench.cases:
        gradients = bench.under(strategy, case)
        for difference in compare(bench.world, gradients) if has_ranks and not method.exchange.every else ():
            differing[difference.name] = differing.get(difference.name, frozenset()) | {*difference.ranks}
        gap = gaps(gradients, bench.under(ONE, case))
        rows.append(Row(f"{case.name}, {case.size} samples", worst(gap), beyond(gap, tolerance)))
    merged: dict[str, Cause] = {}
    failing = bench.world.gather([bool(row.tensors) for row in rows])[0]
    for case, fails in zip(bench.cases, failing, strict=True):
        for cause in causes.find(bench, strategy, case, tolerance) if fails else ():
            merged[cause.name] = cause.merged(merged.get(cause.name, cause))
    reasons = []
    for name, cause in merged.items():
        reasons.append("each rank and micro-batch makes its own random draws in the model" * (name == "randomness"))
        if name in causes.EXCHANGES.values():
            reasons[-1] = cause.sentence.partition("; use")[0]
        if name == "local BatchNorm" and not alone and not method.can_sync_batchnorm:
            reasons[-1] = f"each replica has its own batch statistics under {strategy}: another model"
    by_design = "; ".join(reasons) if all(reasons) and not differing else ""
    return Answer(strategy, tuple(rows), tuple(merged.values()), differing, by_design)
