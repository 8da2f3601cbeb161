"""Whether a run's ledger holds what it has to: each sample exactly once an epoch, where and when the plan says.

Order, steps and shares are pure functions of a run's options, so that each share can be computed again and compared:
another order, a batch that came twice or not at all, and a rank with a seed of its own are found, and the rank is
named. The pages are gone through once, in memory for the samples of one epoch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..batching import BatchPlan
from ..data.order import OF_A_SAMPLER, SHUFFLED, Order
from ..errors import RequestError, counted, ranks_in_short
from ..record.checks import Check
from .pages import EVAL, Indices, Page, TornError, read

CLAIM = "Each epoch and each evaluation held each sample exactly once, in the planned steps and on the planned ranks"
_NAMED = 4
"""Findings that a check names."""
_MOST = 1000
"""Planned samples of a step for each that a page holds of it."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a run was to do, and as far as it is known, what it did."""

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

    def of(self, page: Page) -> BatchPlan:
        """Return how the steps of the page are shared out; raises `RequestError` where they cannot be."""
        return BatchPlan.solve(self.global_batch, page.ranks, accumulation=page.accumulation, devices=page.devices)


class Tally:
    """Which of `samples` samples came how often, in memory for those that came alone: a file may claim any number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._kind = np.min_scalar_type(2 * samples)  # an index has as many bits as the largest, and may be beyond it
        self._parts = [np.empty(0, self._kind)]

    def add(self, indices: Indices) -> None:
        """Count the samples at `indices`."""
        self._parts.append(indices.astype(self._kind))

    def finding(self, expected: int | None) -> str | None:
        """Return in a clause why this is not each sample exactly once; None where it is.

        `expected` is how many samples were to come, all or fewer; None where it is not known, and then none may have
        come twice.
        """
        came = np.sort(np.concatenate(self._parts))
        known, said = came[: np.searchsorted(came, self.samples)], []
        different, times = np.unique(known, return_counts=True)
        if strange := len(came) - len(known):
            said.append(f"{counted(strange, 'index')} of none of the {self.samples:,} samples came")
        if len(repeated := different[times > 1]):
            others = f" and {counted(len(repeated) - 1, 'more sample')}" if len(repeated) > 1 else ""
            said.append(f"sample {repeated[0]}{others} came more than once")
        if expected == self.samples and (missing := self.samples - len(different)):
            first = int(np.append(different != np.arange(len(different)), True).argmax())
            said.append(f"{counted(missing, 'sample')} never came (the first: {first})")
        elif expected is not None and expected not in (self.samples, len(came)):
            said.append(f"{counted(len(came), 'sample')} came of the {expected:,} that were to come")
        return ", and ".join(said) or None


class _Deviations:
    """The shares that are not the planned ones: the first in a clause, and how many there are, of which ranks."""

    def __init__(self) -> None:
        self._first, self._shares, self._steps, self._ranks = "", 0, 0, set[int]()

    def compare(self, page: Page, step: int, planned: Sequence[Indices | range], *, is_known: bool = True) -> None:
        """Compare the shares of a step; where the order is not known, their sizes alone."""
        before = self._shares
        for rank, own in enumerate(planned):
            real = page.share(step, rank)
            if len(real) != len(own) or (is_known and not np.array_equal(real, own)):
                self._first = self._first or f"rank {rank} {_unlike(real, own)} in step {step}"
                self._shares += 1
                self._ranks.add(rank)
        self._steps += self._shares > before

    def __str__(self) -> str:
        if self._shares < 2:
            return self._first
        whose = f"rank {min(self._ranks)} alone" if len(self._ranks) == 1 else ranks_in_short(self._ranks)
        many = f"{counted(self._shares, 'share')} in {counted(self._steps, 'step')}"
        return f"{self._first}; {many} deviate, of {whose}"


def _unlike(real: Indices, planned: Indices | range) -> str:
    if len(real) != len(planned):
        return f"computed {counted(len(real), 'sample')} where the plan has {len(planned)}"
    at = int(np.argmax(real != planned))
    if np.array_equal(np.sort(real), np.sort(planned)):
        return f"computed its samples in another order, sample {real[at]} before {planned[at]},"
    return f"computed sample {real[at]} where the plan has {planned[at]}"


def evaluated(page: Page) -> str:
    """Return in a clause which rank's share of an evaluation is not the planned one; empty where each is."""
    edges = [page.samples * part // page.ranks for part in range(page.ranks + 1)]
    deviations = _Deviations()
    deviations.compare(page, page.first_step, [range(a, b) for a, b in pairwise(edges)])
    return str(deviations)


def check(path: Path, planned: Planned, *, torn_ok: bool = True) -> Check:
    """Return what there is to say of the ledger at `path` of a run that was `planned`.

    Asked is: whether each step is there once, between the first and the last that are known, and an evaluation after
    each step that had one; whether each whole epoch and each evaluation held each sample once (without a smaller last
    batch, as many samples as its steps take), and an epoch that is not whole none twice; and whether each rank
    computed in each step what `BatchPlan` and `Order` give it.

    Raises `RequestError` for a file that is not there or is damaged; a last page that a kill cut short is left out if
    that is `torn_ok`.
    """
    begun_s = time.perf_counter()
    account, torn = _Account(planned), ""
    try:
        for page in read(path):
            account.add(page)
    except TornError:
        if not torn_ok:
            raise
        torn = "; a last page that a kill cut short is left out"
    findings = account.findings()
    more = f"; and {counted(len(findings) - _NAMED, 'more finding')}" if len(findings) > _NAMED else ""
    times = account.epochs + account.evaluations
    return Check(
        name="ledger",
        claim=CLAIM + ", in a sampler's own order, which is not judged" * (planned.order == OF_A_SAMPLER),
        outcome=Check.FAILS if findings else Check.HOLDS if times else Check.OPEN,
        times=times,
        tolerance="exactly",
        found=("; ".join(findings[:_NAMED]) or account.covers()) + more + torn,
        cost_s=time.perf_counter() - begun_s,
    )


class _Account:
    """What the pages so far have held."""

    def __init__(self, planned: Planned) -> None:
        self.epochs = self.evaluations = 0
        self._evaluated: set[int] = set()
        self._planned, self._next = planned, planned.first
        self._found: dict[str, list[str]] = {"steps": [], "epochs": [], "evaluations": []}
        self._deviations = _Deviations()
        self._first: Page | None = None
        self._begin: Page | None = None  # of the epoch under way
        self._last: Page | None = None
        self._tally, self._order = Tally(0), Order(0, seed=planned.seed, epoch=0)

    def covers(self) -> str:
        """Return what was recorded, in words."""
        said = f"{counted(self.epochs, 'epoch')} and {counted(self.evaluations, 'evaluation')}"
        if self._first is not None and self._last is not None:
            said += f", steps {self._first.first_step:,} to {self._last.last_step:,}"
            said += "; what was trained before is not recorded" if self._first.first_step > 1 else ""
        return said

    def add(self, page: Page) -> None:
        """Take the next page."""
        if page.kind == EVAL:
            tally = Tally(page.samples)
            tally.add(page.indices)
            self.evaluations += 1
            self._evaluated.add(page.first_step)
            if found := ", and ".join(filter(None, (tally.finding(page.samples), evaluated(page)))):
                self._found["evaluations"].append(f"the evaluation after step {page.first_step}: {found}")
            return
        if self._last is None or page.epoch != self._last.epoch:
            self._end_epoch(is_last=False)
            self.epochs += 1
            self._begin, self._tally = page, Tally(page.samples)
            self._order = Order(page.samples, seed=self._planned.seed, epoch=page.epoch)
        if self._next is None or (self._first is None and page.first_step < self._next):
            self._next = page.first_step
        if page.first_step < self._next:
            self._found["steps"].append(f"step {page.first_step} is there more than once")
        self._lacks(self._next, page.first_step - 1)
        self._next = max(self._next, page.last_step + 1)
        self._first, self._last = self._first or page, page
        self._tally.add(page.indices)
        self._compare(page)

    def _lacks(self, first: int, last: int) -> None:
        if first <= last:
            said = f"step {first} is" if first == last else f"steps {first} to {last} are"
            self._found["steps"].append(f"{said} missing")

    def _compare(self, page: Page) -> None:
        plan, order = self._planned.of(page), self._planned.order
        per_epoch = plan.steps(page.samples, drop_last=self._planned.drop_last)
        ends = [0, *page.ends[page.ranks - 1 :: page.ranks].tolist()]
        for step, (begin, end) in enumerate(pairwise(ends), page.first_step):
            within = step - 1 - page.epoch * per_epoch
            if begin == end:
                self._lacks(step, step)
                continue
            if not 0 <= within < per_epoch:
                self._found["steps"].append(f"step {step} is noted in epoch {page.epoch}, to which it does not belong")
                return
            start, stop = plan.batch(within, page.samples)
            if stop - start > _MOST * (end - begin):  # a page that claims so much costs a few bytes; to plan it, more
                raise RequestError(
                    f"step {step} of the ledger has {counted(end - begin, 'sample')}, and by the plan {stop - start:,}."
                )
            ordered = self._order.indices(start, stop) if order == SHUFFLED else np.arange(start, stop)
            shares = [ordered[places] for places in _places(plan, stop - start)]
            self._deviations.compare(page, step, shares, is_known=order != OF_A_SAMPLER)

    def _end_epoch(self, *, is_last: bool) -> None:
        first, last, planned = self._begin, self._last, self._planned
        if first is None or last is None:
            return
        # A ledger may begin in the middle of an epoch, and a run end there; in between, no epoch has an excuse.
        per_epoch = planned.of(first).steps(first.samples, drop_last=planned.drop_last)
        begun = first is not self._first or first.first_step == first.epoch * per_epoch + 1
        ended = not is_last or last.last_step >= (first.epoch + 1) * per_epoch
        expected = min(first.samples, per_epoch * planned.global_batch) if begun and ended else None
        if found := self._tally.finding(expected):
            self._found["epochs"].append(f"epoch {first.epoch}: {found}")

    def findings(self) -> list[str]:
        """Return what is wrong, once all pages were added."""
        self._end_epoch(is_last=True)
        steps, last = self._planned.steps, (self._next or 1) - 1
        if steps is not None and self._next is not None:
            self._lacks(self._next, steps)
            if last > steps:
                self._found["steps"].append(f"there is a step {last}, and the run made {counted(steps, 'step')}")
        if absent := sorted({*self._planned.evaluations} - self._evaluated):
            said = f"{counted(len(absent), 'evaluation')} (the first after step {absent[0]}) not there"
            self._found["evaluations"].insert(0, said)
        return [*(each for found in self._found.values() for each in found), *filter(None, [str(self._deviations)])]


@lru_cache(maxsize=16)
def _places(plan: BatchPlan, count: int) -> list[Indices]:
    """Return of each rank the places in a batch of `count` samples that it computes, in this order."""
    return [
        np.concatenate([np.arange(share.start, share.stop) for share in plan.split(0, count, rank)])
        for rank in range(plan.ranks)
    ]
