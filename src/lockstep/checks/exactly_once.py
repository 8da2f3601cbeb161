"""Whether samples came exactly once: counted while a run trains, and again from the ledger that it has left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import numpy as np

from ..batching import BatchPlan
from ..errors import counted
from ..record.checks import Check
from .pages import TRAIN, Page, TornError, read

CLAIM = "Each epoch and each evaluation held each sample exactly once"
_NAMED = 4
"""Findings that a check names."""


class Tally:
    """How often each of `samples` samples came."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        # An index has as many bits as the largest sample, and may be beyond it. Memory is for those that came alone.
        self._kind = np.min_scalar_type(2 * samples)
        self._pages: list[Page] = []

    def add(self, page: Page) -> None:
        """Count the samples of a page."""
        self._pages.append(dataclasses.replace(page, indices=page.indices.astype(self._kind)))

    def finding(self, expected: int | None) -> str:
        """Return in a clause why this is not each sample exactly once; "" where it is.

        `expected` is how many samples were to come, all or fewer; None where that is not known, and it is only asked
        whether one came twice.
        """
        came = np.concatenate([np.empty(0, self._kind), *(page.indices for page in self._pages)])
        different, times = np.unique(came, return_counts=True)
        known = int(np.searchsorted(different, self.samples))
        clauses = [f"{known:,} of {expected:,} samples came"] if expected not in (None, known) else []
        if len(repeated := different[times > 1]):
            others = f" and {counted(len(repeated) - 1, 'more sample')}" if len(repeated) > 1 else ""
            places = [place for page in self._pages for place in page.places(repeated[0])]
            where = " and ".join(f"in step {step} on rank {rank}" for step, rank in places[:2])
            clauses.append(f"sample {repeated[0]}{others} came more than once, {where}")
        return ", and ".join(clauses)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a run was to do and, where it is known, what it did."""

    global_batch: int
    drop_last: bool = False
    first: int | None = None  # the step from which on it kept a ledger
    steps: int | None = None  # the optimizer steps that it made
    evaluations: Collection[int] = ()  # the steps after which it evaluated, from `first` on


def check(path: Path, planned: Planned, *, torn_ok: bool = True) -> Check:
    """Return what there is to say of the ledger at `path` of a run that was `planned`.

    Each known step has to be there once, and an evaluation after each step that had one; each evaluation and each whole
    epoch has to hold each sample once (without a smaller last batch, as many samples as its steps take), and an epoch
    that is not whole none twice.

    Raises `RequestError` for a file that is not there or is damaged; a last page that a kill cut short is left out if
    that is `torn_ok`.
    """
    begun_s, torn = time.perf_counter(), ""
    evaluated: dict[int, str] = {}

    def trained() -> Iterator[Page]:
        nonlocal torn
        try:
            for page in read(path):
                if page.kind == TRAIN:
                    yield page
                else:
                    evaluated[page.first_step] = of_evaluation(page)
        except TornError:
            if not torn_ok:
                raise
            torn = "; a last page that a kill cut short is left out"

    findings, epochs, first, due = list[str](), 0, 0, planned.first or 0
    plan = BatchPlan(global_size=planned.global_batch, ranks=1, accumulation=1)
    for epoch, group in groupby(trained(), key=lambda page: page.epoch):
        begin = next(group)
        if not first:  # another folder's run may have begun the ledger
            first, due = begin.first_step, min(due or begin.first_step, begin.first_step)
        epochs, tally = epochs + 1, Tally(begin.samples)
        for page in chain([begin], group):
            if page.first_step != due:
                findings.append(f"step {page.first_step} follows step {due - 1}")
            due = page.last_step + 1
            tally.add(page)
        per_epoch = plan.steps(begin.samples, drop_last=planned.drop_last)
        # A ledger may begin in the middle of an epoch, and a run end there.
        is_whole = begin.first_step == epoch * per_epoch + 1 and due == (epoch + 1) * per_epoch + 1
        if finding := tally.finding(min(begin.samples, per_epoch * planned.global_batch) if is_whole else None):
            findings.append(f"epoch {epoch}: {finding}")
    if due and planned.steps is not None and due != planned.steps + 1:
        findings.append(f"it ends with step {due - 1:,}, and the run made {counted(planned.steps, 'step')}")
    findings += [f"the evaluation after step {step}: {finding}" for step, finding in evaluated.items() if finding]
    if absent := sorted({*planned.evaluations} - evaluated.keys()):
        findings.append(f"{counted(len(absent), 'evaluation')} (the first after step {absent[0]}) not there")
    covered = f"{counted(epochs, 'epoch')} and {counted(len(evaluated), 'evaluation')}"
    covered += f", steps {first:,} to {due - 1:,}" * bool(first)
    covered += "; what was trained before is not recorded" * (first > 1)
    more = f"; and {counted(len(findings) - _NAMED, 'more finding')}" if len(findings) > _NAMED else ""
    return Check(
        name="ledger",
        claim=CLAIM,
        outcome=Check.FAILS if findings else Check.HOLDS if epochs or evaluated else Check.OPEN,
        times=epochs + len(evaluated),
        tolerance="exactly",
        found=("; ".join(findings[:_NAMED]) or covered) + more + torn,
        cost_s=time.perf_counter() - begun_s,
    )


def of_evaluation(page: Page) -> str:
    """Return in a clause why an evaluation did not hold each sample exactly once; "" where it did."""
    tally = Tally(page.samples)
    tally.add(page)
    return tally.finding(page.samples)
