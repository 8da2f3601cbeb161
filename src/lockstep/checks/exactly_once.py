"""Whether a run's ledger holds each sample exactly once an epoch, where and when the plan says.

Order, steps and shares are pure functions of a run's options, so each share is computed again and compared: another
order, a batch that came twice or not at all, and a rank with a seed of its own are found, and the rank is named. Pages
are read once, in memory for the samples of one epoch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, pairwise
from pathlib import Path

import numpy as np

from ..batching import BatchPlan
from ..data.order import OF_A_SAMPLER, SHUFFLED, Order
from ..errors import RequestError, counted, ranks_in_short
from ..record.checks import Check
from .pages import EVAL, TRAIN, Indices, Page, TornError, read

CLAIM = "Each epoch and each evaluation held each sample exactly once, in the planned steps and on the planned ranks"
_NAMED = 4
"""Findings that a check names."""
_MOST = 1000
"""Planned samples of a step for each that its page holds: a page from somewhere may claim any number."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a run was to do and, where it is known, what it did."""

    global_batch: int
    seed: int
    drop_last: bool = False
    first: int | None = None
    """The step from which on it kept a ledger."""
    order: str = SHUFFLED
    steps: int | None = None
    """The optimizer steps that it made."""
    evaluations: Collection[int] = ()
    """The steps after which it evaluated, from `first` on."""

    def of(self, page: Page, samples: int) -> tuple[BatchPlan, int]:
        """Return how a page's steps are shared out, and how many an epoch has; raises where they cannot be."""
        plan = BatchPlan.solve(self.global_batch, page.ranks, accumulation=page.accumulation, devices=page.devices)
        return plan, plan.steps(samples, drop_last=self.drop_last)


class Tally:
    """How often each of `samples` samples came."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        # An index has as many bits as the largest sample, and may be beyond it. Memory is for those that came alone.
        self._came = [np.empty(0, np.min_scalar_type(2 * samples))]

    def add(self, indices: Indices) -> None:
        """Count the samples at `indices`."""
        self._came.append(indices.astype(self._came[0].dtype))

    def finding(self, expected: int | None) -> str:
        """Return in a clause why this is not each sample exactly once; "" where it is.

        `expected` is how many samples were to come, all or fewer; None where that is not known, and it is only asked
        whether one came twice.
        """
        came = np.sort(np.concatenate(self._came))
        known, clauses = came[: np.searchsorted(came, self.samples)], []
        different, times = np.unique(known, return_counts=True)
        if strange := len(came) - len(known):
            clauses.append(f"{counted(strange, 'sample')} came beyond the {self.samples:,} of the data set")
        if len(repeated := different[times > 1]):
            others = f" and {counted(len(repeated) - 1, 'more sample')}" if len(repeated) > 1 else ""
            clauses.append(f"sample {repeated[0]}{others} came more than once")
        if expected == self.samples and (missing := self.samples - len(different)):
            first = int(np.append(different != np.arange(len(different)), True).argmax())
            clauses.append(f"{counted(missing, 'sample')} never came (the first: {first})")
        elif expected is not None and expected not in (self.samples, len(came)):
            clauses.append(f"{counted(len(came), 'sample')} came of the {expected:,} that were to come")
        return ", and ".join(clauses)


class _Deviations:
    """Shares that are not the planned ones: the first in words, and how many on which ranks."""

    def __init__(self) -> None:
        self._first = ""
        self._shares = Counter[int]()

    def compare(self, page: Page, step: int, planned: Sequence[Indices | range], *, by_size: bool = False) -> None:
        """Compare the ranks' shares of a step, `by_size` alone where their order is not known."""
        for rank, share in enumerate(planned):
            real = page.share(step, rank)
            if len(real) != len(share):
                how = f"{counted(len(real), 'sample')} where the plan has {len(share)}"
            elif by_size or np.array_equal(real, share):
                continue
            else:
                at = int(np.argmax(real != share))
                how = f"sample {real[at]} where the plan has {share[at]}"
            self._first = self._first or f"rank {rank} computed {how} in step {step}"
            self._shares[rank] += 1

    def __str__(self) -> str:
        """Return what deviates in a clause; "" where nothing does."""
        if self._shares.total() < 2:
            return self._first
        whose = f"{ranks_in_short(self._shares)}{' alone' if len(self._shares) == 1 else ''}"
        return f"{self._first}; {self._shares.total()} shares deviate, of {whose}"


def evaluated(page: Page) -> str:
    """Return in a clause which rank's share of an evaluation is not the planned one; "" where each is."""
    edges = [page.samples * part // page.ranks for part in range(page.ranks + 1)]
    deviations = _Deviations()
    deviations.compare(page, page.first_step, [range(a, b) for a, b in pairwise(edges)])
    return str(deviations)


def check(path: Path, planned: Planned, *, torn_ok: bool = True) -> Check:
    """Return what there is to say of the ledger at `path` of a run that was `planned`.

    Each known step has to be there once, and an evaluation after each step that had one; each whole epoch has to hold
    each sample once (without a smaller last batch, as many samples as its steps take), and an epoch that is not whole
    none twice; each rank's share of a step or evaluation has to be what `BatchPlan` and `Order` give it.

    Raises `RequestError` for a file that is not there or is damaged; a last page that a kill cut short is left out if
    that is `torn_ok`.
    """
    begun_s, torn = time.perf_counter(), ""

    def pages(kind: str) -> Iterator[Page]:
        nonlocal torn
        try:
            yield from (page for page in read(path) if page.kind == kind)
        except TornError:
            if not torn_ok:
                raise
            torn = "; a last page that a kill cut short is left out"

    trained = _Trained(planned)
    findings = [*trained.findings(pages(TRAIN))]
    found = {page.first_step: evaluated(page) for page in pages(EVAL)}
    findings += [f"the evaluation after step {step}: {finding}" for step, finding in found.items() if finding]
    if absent := sorted({*planned.evaluations} - found.keys()):
        findings.append(f"{counted(len(absent), 'evaluation')} (the first after step {absent[0]}) not there")
    findings += filter(None, [str(trained.deviations)])
    more = f"; and {counted(len(findings) - _NAMED, 'more finding')}" if len(findings) > _NAMED else ""
    times = trained.epochs + len(found)
    covered = f"{counted(trained.epochs, 'epoch')} and {counted(len(found), 'evaluation')}{trained.steps}"
    return Check(
        name="ledger",
        claim=CLAIM + ", in a sampler's own order, which is not judged" * (planned.order == OF_A_SAMPLER),
        outcome=Check.FAILS if findings else Check.HOLDS if times else Check.OPEN,
        times=times,
        tolerance="exactly",
        found=("; ".join(findings[:_NAMED]) or covered) + more + torn,
        cost_s=time.perf_counter() - begun_s,
    )


class _Trained:
    """What the pages of training have held."""

    def __init__(self, planned: Planned) -> None:
        self.epochs = 0
        self.steps = ""
        """From which step to which, in words."""
        self.deviations = _Deviations()
        self._planned = planned

    def findings(self, pages: Iterable[Page]) -> Iterator[str]:
        """Yield what is wrong, but for deviating shares."""
        planned, first, due = self._planned, 0, 0
        for epoch, group in groupby(pages, key=lambda page: page.epoch):
            self.epochs += 1
            begin = next(group)
            tally, order = Tally(begin.samples), Order(begin.samples, seed=planned.seed, epoch=epoch)
            if not first:
                first = begin.first_step
                due = min(planned.first or first, first)  # another folder's run may have begun the ledger
            for page in chain([begin], group):
                yield from _gap(due, page.first_step)
                due = page.last_step + 1
                tally.add(page.indices)
                yield from self._compare(page, order)
            _, per_epoch = planned.of(begin, begin.samples)
            # A ledger may begin in the middle of an epoch, and a run end there.
            is_whole = begin.first_step == epoch * per_epoch + 1 and due == (epoch + 1) * per_epoch + 1
            if finding := tally.finding(min(begin.samples, per_epoch * planned.global_batch) if is_whole else None):
                yield f"epoch {epoch}: {finding}"
        due = due or planned.first or 0
        if due and planned.steps is not None and due != planned.steps + 1:
            yield f"it ends with step {due - 1:,}, and the run made {counted(planned.steps, 'step')}"
        if first:
            more = "; what was trained before is not recorded" if first > 1 else ""
            self.steps = f", steps {first:,} to {due - 1:,}{more}"

    def _compare(self, page: Page, order: Order) -> Iterator[str]:
        """Compare each rank's share of each step; yield which steps are empty or of another epoch."""
        plan, per_epoch = self._planned.of(page, order.samples)
        for step, count in enumerate(page.counts.sum(1).tolist(), page.first_step):
            within = step - 1 - page.epoch * per_epoch
            if not count:
                yield from _gap(step, step + 1)
                continue
            if not 0 <= within < per_epoch:
                yield f"step {step} is noted in epoch {page.epoch}, to which it does not belong"
                return
            start, stop = plan.batch(within, order.samples)
            if stop - start > _MOST * count:
                raise RequestError(
                    f"step {step} of the ledger has {counted(count, 'sample')}, and by the plan {stop - start:,}."
                )
            is_shuffled = self._planned.order == SHUFFLED
            ordered = order.indices(start, stop) if is_shuffled else np.arange(start, stop)
            shares = [ordered[places] for places in _places(plan, stop - start)]
            self.deviations.compare(page, step, shares, by_size=self._planned.order == OF_A_SAMPLER)


def _gap(due: int, found: int) -> Iterator[str]:
    """Yield what it means that step `found` follows where step `due` should; nothing where it is that one."""
    if found < due:
        yield f"step {found} is there more than once"
    elif found > due:
        yield f"step {due} is missing" if found == due + 1 else f"steps {due} to {found - 1} are missing"


@lru_cache(maxsize=16)
def _places(plan: BatchPlan, count: int) -> list[Indices]:
    """Return for each rank the places in a batch of `count` samples that it computes, in this order."""
    return [
        np.concatenate([np.arange(share.start, share.stop) for share in plan.split(0, count, rank)])
        for rank in range(plan.ranks)
    ]
