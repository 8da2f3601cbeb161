"""Whether a run's ledger holds what it has to: each sample exactly once an epoch, where and when the plan says.

Order and shares are pure functions of the run's seed, its global batch and the world it ran in. So each share of each
step can be computed again and compared: another order, a batch that came twice or not at all, and a rank with a seed
of its own are found, and the rank is named. The pages are gone through several times, one at a time, so that a ledger
of any length takes one byte of memory for each sample of the data set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from ..batching import BatchPlan
from ..data.order import Order
from ..errors import counted
from ..proof import Check
from .ledger import Tally
from .pages import EVAL, TRAIN, Indices, Page, TornError, places, read

_PLACES = 4
"""Places of a repeated sample that a sentence names, and findings that a check does."""
CLAIM = "Each epoch and each evaluation held each sample exactly once, in the planned steps and on the planned ranks"


@dataclass(frozen=True)
class Verdict:
    """What a ledger was found to hold."""

    findings: tuple[str, ...]
    """What is wrong, each a sentence without its full stop."""
    first_step: int
    """The first step that was recorded; 0 where none was."""
    last_step: int
    first_epoch: int
    last_epoch: int
    epochs: int
    """Epochs of which steps were recorded."""
    evaluations: int

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong with what was recorded."""
        return not self.findings

    @property
    def covers(self) -> str:
        """What was recorded, in words."""
        said = f"{counted(self.epochs, 'epoch')} and {counted(self.evaluations, 'evaluation')}"
        if self.first_step:
            said += f", steps {self.first_step:,} to {self.last_step:,}"
        if self.first_step > 1:
            said += "; what was trained before is not recorded"
        return said


@dataclass(frozen=True)
class _File:
    """The pages of a file, read anew each time that they are gone through."""

    path: Path
    torn_ok: bool

    def __iter__(self) -> Iterator[Page]:
        return read(self.path, torn_ok=self.torn_ok)


def check(
    path: Path,
    *,
    global_batch: int,
    seed: int,
    drop_last: bool,
    first: int | None = None,
    steps: int | None = None,
    evaluations: Collection[int] = (),
) -> Check:
    """Return what there is to say of the ledger at `path`, of a run with these options.

    `steps` is how many optimizer steps the run made, `first` the one from which on it kept a ledger, and `evaluations`
    the steps after which it evaluated since: where they are known, a ledger that lacks some of it is found.
    Raises `RequestError` for a file that is not there or is damaged. A last page that a kill cut short is none.
    """
    begun_s = time.perf_counter()
    asked = partial(
        judge,
        global_batch=global_batch,
        seed=seed,
        drop_last=drop_last,
        first=first,
        steps=steps,
        evaluations=evaluations,
    )
    torn = ""
    try:
        verdict = asked(_File(path, False))
    except TornError:
        torn = "; a last page that a kill cut short is left out"
        verdict = asked(_File(path, True))
    said = "; ".join(verdict.findings[:_PLACES]) or verdict.covers
    if (more := len(verdict.findings) - _PLACES) > 0:
        said += f"; and {counted(more, 'more finding')}"
    times = verdict.epochs + verdict.evaluations
    outcome = Check.FAILS if verdict.findings else Check.HOLDS if times else Check.OPEN
    return Check(
        name="ledger",
        claim=CLAIM,
        outcome=outcome,
        times=times,
        tolerance="exactly",
        found=said + torn,
        cost_s=time.perf_counter() - begun_s,
    )


def judge(
    pages: Iterable[Page],
    *,
    global_batch: int,
    seed: int,
    drop_last: bool = False,
    first: int | None = None,
    steps: int | None = None,
    evaluations: Collection[int] = (),
) -> Verdict:
    """Return what is wrong with `pages`, which are gone through several times: a sequence, or a file's.

    Asked is: whether each step is there once, from `first` and up to `steps` where these are given, and an evaluation
    after each step in `evaluations`; whether each whole epoch and each
    evaluation held each sample once (with `drop_last`, as many samples as its steps take), and an epoch that is not
    whole none twice; and whether each rank computed in each step what `BatchPlan` and `Order` give it.
    """
    assert iter(pages) is not pages, "an iterator can be gone through once"
    plan = _Plan(global_batch, seed, drop_last)
    trained = [(page.epoch, page.first_step, page.last_step) for page in pages if page.kind == TRAIN]
    epochs = sorted({epoch for epoch, _, _ in trained})
    first_epoch, last_epoch = (epochs[0], epochs[-1]) if epochs else (0, 0)
    found = [
        *_changes(pages),
        *_steps(pages, first, steps),
        *_epochs(pages, plan, first_epoch, last_epoch),
        *_evaluations(pages, evaluations),
        *_shares(pages, plan),
    ]
    return Verdict(
        findings=tuple(found),
        first_step=min((first for _, first, _ in trained), default=0),
        last_step=max((last for _, _, last in trained), default=0),
        first_epoch=first_epoch,
        last_epoch=last_epoch,
        epochs=len(epochs),
        evaluations=sum(page.kind == EVAL for page in pages),
    )


@dataclass(frozen=True)
class _Plan:
    """What a run's steps were to be."""

    global_batch: int
    seed: int
    drop_last: bool

    def of(self, page: Page) -> BatchPlan:
        """Return how the steps of the page are shared out."""
        return BatchPlan(global_size=self.global_batch, ranks=page.ranks, accumulation=page.accumulation)

    def steps_per_epoch(self, page: Page) -> int:
        """Return the optimizer steps in an epoch."""
        return self.of(page).steps(page.samples, drop_last=self.drop_last)

    def expected(self, page: Page) -> int:
        """Return how many samples come in an epoch."""
        return min(page.samples, self.steps_per_epoch(page) * self.global_batch)


def _of(pages: Iterable[Page], kind: str, epoch: int | None = None) -> Iterator[Page]:
    return (page for page in pages if page.kind == kind and epoch in (None, page.epoch))


def _changes(pages: Iterable[Page]) -> Iterator[str]:
    """Yield what changed that stays as it is, whatever the world: the data set, and the number of micro-batches."""
    before: Page | None = None
    for page in _of(pages, TRAIN):
        if before is not None and page.samples != before.samples:
            yield (
                f"from step {page.first_step} on, the training set has {counted(page.samples, 'sample')}, and had "
                f"{before.samples:,}"
            )
        if before is not None and page.accumulation != before.accumulation:
            yield (
                f"from step {page.first_step} on, a batch has {counted(page.accumulation, 'global micro-batch')}, and "
                f"had {before.accumulation}"
            )
        before = page


def _steps(pages: Iterable[Page], first: int | None, steps: int | None) -> Iterator[str]:
    """Yield which steps are missing between the first and the last, or there twice."""
    missing: list[tuple[int, int]] = []
    twice: list[tuple[int, int]] = []
    last = None if first is None else first - 1
    if first is not None and (begin := next(_of(pages, TRAIN), None)) is not None and begin.first_step < first:
        last = None  # what lies before is there as well
    for page in _of(pages, TRAIN):
        if last is not None and page.first_step > last + 1:
            missing.append((last + 1, page.first_step - 1))
        if last is not None and page.first_step <= last:
            twice.append((page.first_step, min(last, page.last_step)))
        empty = np.flatnonzero(page.counts.sum(axis=1) == 0) + page.first_step
        missing += [(step, step) for step in empty.tolist()]
        last = page.last_step if last is None else max(last, page.last_step)
    if steps is not None and last is not None and last < steps:
        missing.append((last + 1, steps))
    if missing:
        yield f"{_range(missing)} missing"
    if twice:
        yield f"{_range(twice)} there more than once"
    if steps is not None and last is not None and last > steps:
        yield f"there is a step {last}, and the run made {counted(steps, 'step')}"


def _range(ranges: Sequence[tuple[int, int]]) -> str:
    number = sum(last - first + 1 for first, last in ranges)
    first = min(first for first, _ in ranges)
    return f"step {first} is" if number == 1 else f"{counted(number, 'step')} (the first: {first}) are"


def _epochs(pages: Iterable[Page], plan: _Plan, first_epoch: int, last_epoch: int) -> Iterator[str]:
    """Yield of each epoch why it did not hold each sample once."""
    for epoch, group in groupby(_of(pages, TRAIN), key=lambda page: page.epoch):
        tally, first, last = _tallied(group)
        # A ledger may begin in the middle of an epoch, and a run end there; in between, no epoch has an excuse.
        per_epoch = plan.steps_per_epoch(first)
        begun = epoch != first_epoch or first.first_step == epoch * per_epoch + 1
        ended = epoch != last_epoch or last.last_step >= (epoch + 1) * per_epoch
        repeated = _repeated(partial(_of, pages, TRAIN, epoch), tally)
        if found := tally.finding(plan.expected(first) if begun and ended else None, repeated=repeated):
            yield f"epoch {epoch}: {found}"


def _evaluations(pages: Iterable[Page], expected: Collection[int]) -> Iterator[str]:
    """Yield of each evaluation why it did not hold each sample once, or not on the rank that has it."""
    if missing := sorted({*expected} - {page.first_step for page in _of(pages, EVAL)}):
        yield f"{counted(len(missing), 'evaluation')} (the first after step {missing[0]}) not there"
    for page in _of(pages, EVAL):
        tally, _, _ = _tallied([page])
        said = [tally.finding(page.samples, repeated=_repeated(partial(iter, [page]), tally))]
        deviations = _Deviations()
        for rank in range(page.ranks):
            first, end = (page.samples * part // page.ranks for part in (rank, rank + 1))
            deviations.compare(page, page.first_step, rank, np.arange(first, end))
        said.append(deviations.said)
        if found := ", and ".join(filter(None, said)):
            yield f"the evaluation after step {page.first_step}: {found}"


def _tallied(pages: Iterable[Page]) -> tuple[Tally, Page, Page]:
    """Return which samples came in `pages`, and the first and the last of these, one at least."""
    first: Page | None = None
    for page in pages:
        if first is None:
            first, tally = page, Tally(page.samples)
        tally.add(page.indices)
    assert first is not None
    return tally, first, page


def _repeated(pages: Callable[[], Iterable[Page]], tally: Tally) -> str:
    """Return which sample came more than once in `pages`, where, and how many more did; empty where none did."""
    if not tally.repeats:
        return ""
    times = np.zeros(tally.samples, np.uint8)
    for page in pages():
        came, often = np.unique(page.indices[page.indices < tally.samples], return_counts=True)
        times[came] = np.minimum(times[came] + often, 2)
    more = int(np.count_nonzero(times == 2)) - 1
    sample = int(np.argmax(times == 2))
    found = [place for page in pages() for place in places(page, sample)]
    where = ", ".join(f"step {step} on rank {rank}" for _, step, rank in found[:_PLACES])
    where += ", …" * (len(found) > _PLACES)
    often_said = "twice" if len(found) == 2 else f"{len(found)} times"
    others = f" and {counted(more, 'more sample')} more than once" if more else ""
    return f"sample {sample} came {often_said} ({where}){others}"


@dataclass
class _Deviations:
    """The shares that are not the planned ones: the first in a clause, and of which ranks and steps they all are."""

    first: str = ""
    shares: int = 0
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)

    def compare(self, page: Page, step: int, rank: int, planned: Indices) -> None:
        """Note the rank's share of the step if it is not `planned`, in this order."""
        real = page.share(step, rank)
        if np.array_equal(real, planned):
            return
        self.first = self.first or f"rank {rank} {_unlike(real, planned)} in step {step}"
        self.shares += 1
        self.steps.add(step)
        self.ranks.add(rank)

    @property
    def said(self) -> str:
        """The first, and how many there are, in a clause; empty where there is none."""
        if self.shares <= 1:
            return self.first
        some = sorted(self.ranks)
        named = ", ".join(map(str, some[:_PLACES])) + ", …" * (len(some) > _PLACES)
        ranks = f"rank {named} alone" if len(some) == 1 else f"ranks {named}"
        return (
            f"{self.first}; {counted(self.shares, 'share')} in {counted(len(self.steps), 'step')} deviate, of {ranks}"
        )


def _unlike(real: Indices, planned: Indices) -> str:
    """Return in words how the share `real` is not the one that was planned."""
    if len(real) != len(planned):
        return f"computed {counted(len(real), 'sample')} where the plan has {len(planned)}"
    at = int(np.argmax(real != planned))
    if np.array_equal(np.sort(real), np.sort(planned)):
        return f"computed its samples in another order, sample {real[at]} before {planned[at]},"
    return f"computed sample {real[at]} where the plan has {planned[at]}"


def _shares(pages: Iterable[Page], plan: _Plan) -> Iterator[str]:
    """Yield the first share of a step that is not the planned one, and how many are not."""
    deviations, strange = _Deviations(), []
    shares = _Shares(plan)
    for page in _of(pages, TRAIN):
        ends = [0, *page.ends[page.ranks - 1 :: page.ranks].tolist()]
        for number, (begin, end) in enumerate(pairwise(ends)):
            step = page.first_step + number
            if begin == end:
                continue  # a missing step
            if (planned := shares.of(page, step)) is None:
                strange.append((step, page.epoch))
                continue
            counts, indices = planned
            if not (np.array_equal(page.counts[number], counts) and np.array_equal(page.indices[begin:end], indices)):
                for rank, share in enumerate(np.split(indices, np.cumsum(counts)[:-1])):
                    deviations.compare(page, step, rank, share)
    if strange:
        step, epoch = strange[0]
        more = f", and so are {counted(len(strange) - 1, 'more step')}" if len(strange) > 1 else ""
        yield f"step {step} is noted in epoch {epoch}, to which it does not belong{more}"
    if deviations.shares:
        yield deviations.said


class _Shares:
    """The planned shares of one step after the other; keeps the order of the epoch, and how batches are shared out."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._order = Order(0, seed=plan.seed, epoch=0)
        self._epoch = -1
        self._layouts: dict[tuple[BatchPlan, int], tuple[Indices, Indices]] = {}

    def of(self, page: Page, step: int) -> tuple[Indices, Indices] | None:
        """Return the planned counts (ranks,) and samples (counts.sum(),) of a step; None if it is of another epoch."""
        plan, per_epoch = self._plan.of(page), self._plan.steps_per_epoch(page)
        within = step - 1 - page.epoch * per_epoch
        if not 0 <= within < per_epoch:
            return None
        if (self._order.samples, self._epoch) != (page.samples, page.epoch):
            self._order, self._epoch = Order(page.samples, seed=self._plan.seed, epoch=page.epoch), page.epoch
        start, stop = plan.batch(within, page.samples)
        if (key := (plan, stop - start)) not in self._layouts:
            self._layouts[key] = _layout(plan, stop - start)
        counts, places = self._layouts[key]
        return counts, self._order.indices(start, stop)[places]


def _layout(plan: BatchPlan, count: int) -> tuple[Indices, Indices]:
    """Return how a batch of `count` samples is shared out.

    That is how many each rank has, (ranks,), and their places in the batch, (count,), by rank and in the order in
    which the rank computes them.
    """
    by_rank = [
        np.concatenate([np.arange(share.start, share.stop) for share in plan.split(0, count, rank)])
        for rank in range(plan.ranks)
    ]
    return np.array([len(own) for own in by_rank]), np.concatenate(by_rank)
