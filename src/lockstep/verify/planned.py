"""What a run's ledger has to hold: the order, the steps and the shares of each rank are pure functions of its options.

So each share of each step can be computed again and compared: another order, a batch that came twice or not at all,
and a rank with a seed of its own are found, and the rank is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ..batching import BatchPlan
from ..data.order import OF_A_SAMPLER, SHUFFLED, Order
from ..errors import RequestError, counted
from .pages import TRAIN, Indices, Page, of_kind

_RANKS = 4
"""Ranks that a sentence names."""
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

    def steps_per_epoch(self, page: Page) -> int:
        """Return the optimizer steps in an epoch."""
        return self.of(page).steps(page.samples, drop_last=self.drop_last)

    def samples_per_epoch(self, page: Page) -> int:
        """Return how many samples come in an epoch: fewer than there are where a smaller last batch is left out."""
        return min(page.samples, self.steps_per_epoch(page) * self.global_batch)


def trained(pages: Iterable[Page], planned: Planned) -> Iterator[str]:
    """Yield the first share of a step that is not the planned one, and how many are not; and steps of other epochs.

    In the order of a user's sampler, how many samples a share has is all that is planned.
    """
    is_known = planned.order != OF_A_SAMPLER
    deviations, strange = Deviations(), []
    shares = _Shares(planned)
    for page in of_kind(TRAIN, pages):
        ends = [0, *page.ends[page.ranks - 1 :: page.ranks].tolist()]
        for number, (begin, end) in enumerate(pairwise(ends)):
            step = page.first_step + number
            if begin == end:
                continue  # a missing step
            if (share := shares.of(page, step, end - begin)) is None:
                strange.append((step, page.epoch))
                continue
            counts, indices = share
            same = np.array_equal(page.counts[number], counts)
            if not (same and (not is_known or np.array_equal(page.indices[begin:end], indices))):
                for rank, own in enumerate(np.split(indices, np.cumsum(counts)[:-1])):
                    if is_known or len(own) != len(page.share(step, rank)):
                        deviations.compare(page, step, rank, own)
    if strange:
        step, epoch = strange[0]
        more = f", and so are {counted(len(strange) - 1, 'more step')}" if len(strange) > 1 else ""
        yield f"step {step} is noted in epoch {epoch}, to which it does not belong{more}"
    if deviations.shares:
        yield deviations.said


def evaluated(page: Page) -> str:
    """Return in a clause which rank's share of an evaluation is not the planned one; empty where each is."""
    deviations = Deviations()
    for rank in range(page.ranks):
        first, end = (page.samples * part // page.ranks for part in (rank, rank + 1))
        deviations.compare(page, page.first_step, rank, range(first, end))  # no array of what a page only claims
    return deviations.said


@dataclass
class Deviations:
    """The shares that are not the planned ones: the first in a clause, and of which ranks and steps they all are."""

    first: str = ""
    shares: int = 0
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)

    def compare(self, page: Page, step: int, rank: int, planned: Indices | range) -> None:
        """Note the rank's share of the step if it is not `planned`, in this order."""
        real = page.share(step, rank)
        if len(real) == len(planned) and np.array_equal(real, planned):
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
        named = ", ".join(map(str, some[:_RANKS])) + ", …" * (len(some) > _RANKS)
        ranks = f"rank {named} alone" if len(some) == 1 else f"ranks {named}"
        return (
            f"{self.first}; {counted(self.shares, 'share')} in {counted(len(self.steps), 'step')} deviate, of {ranks}"
        )


def _unlike(real: Indices, planned: Indices | range) -> str:
    """Return in words how the share `real` is not the one that was planned."""
    if len(real) != len(planned):
        return f"computed {counted(len(real), 'sample')} where the plan has {len(planned)}"
    at = int(np.argmax(real != planned))
    if np.array_equal(np.sort(real), np.sort(planned)):
        return f"computed its samples in another order, sample {real[at]} before {planned[at]},"
    return f"computed sample {real[at]} where the plan has {planned[at]}"


class _Shares:
    """The planned shares of one step after the other; keeps the order of the epoch."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._order = Order(0, seed=planned.seed, epoch=0)
        self._epoch = -1

    def of(self, page: Page, step: int, held: int) -> tuple[Indices, Indices] | None:
        """Return the planned counts (ranks,) and samples (counts.sum(),) of a step; None if it is of another epoch.

        The page holds `held` samples of it. Raises `RequestError` where the plan has vastly more.
        """
        plan, per_epoch = self._planned.of(page), self._planned.steps_per_epoch(page)
        within = step - 1 - page.epoch * per_epoch
        if not 0 <= within < per_epoch:
            return None
        if self._planned.order == SHUFFLED and (self._order.samples, self._epoch) != (page.samples, page.epoch):
            self._order, self._epoch = Order(page.samples, seed=self._planned.seed, epoch=page.epoch), page.epoch
        start, stop = plan.batch(within, page.samples)
        if stop - start > _MOST * held:  # a page that claims so much costs a few bytes, and to plan it would not
            raise RequestError(
                f"step {step} of the ledger has {counted(held, 'sample')}, and by the plan {stop - start:,}."
            )
        counts, places = _layout(plan, stop - start)
        ordered = self._order.indices(start, stop) if self._planned.order == SHUFFLED else np.arange(start, stop)
        return counts, ordered[places]


@lru_cache(maxsize=16)
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
