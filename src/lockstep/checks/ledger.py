"""The run's ledger, `ledger.bin`: which samples each step computed (see `pages`).

Every rank records, rank 0 writes. The current epoch's samples are counted, to check each for exactly one occurrence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..batching import BatchPlan
from ..data.order import ASCENDING, SHUFFLED, Order
from ..errors import ProofError, RequestError, counted, ranks_named
from ..files import Appended
from ..record.checks import Check
from ..world.world import World
from .pages import EVAL, NAME, TRAIN, Indices, Page, TornError, read

CLAIM = "Each epoch and each evaluation held each sample exactly once"
_NAMED = 4
"""Findings that a check names."""
Notes = list[tuple[int, Indices]]
"""The samples (n,) that a rank has computed, with their step; steps rise."""


def _add(page: Page, pages: list[Page]) -> None:
    samples = (pages or [page])[0].samples
    # An index has as many bits as the largest sample, and may exceed it. Only recorded samples take memory.
    pages.append(dataclasses.replace(page, indices=page.indices.astype(np.min_scalar_type(2 * samples))))


def _finding(pages: Sequence[Page], expected: int | None) -> str:
    """Return a clause on samples not held exactly once; "" for none. At least one page.

    `expected` is the number of samples that were due, all or fewer; None where unknown: then only repeated samples
    count.
    """
    samples = pages[0].samples
    different, times = np.unique(np.concatenate([page.indices for page in pages]), return_counts=True)
    known = int(np.searchsorted(different, samples))
    clauses = [f"{known:,} of {expected:,} samples came"] if expected not in (None, known) else []
    if strange := len(different) - known:
        clauses.append(f"{counted(strange, 'number')} of none of the {samples:,} samples came")
    if len(repeated := different[times > 1]):
        others = f" and {counted(len(repeated) - 1, 'more sample')}" if len(repeated) > 1 else ""
        places = [place for page in pages for place in page.places(repeated[0])]
        where = " and ".join(f"in step {step} on rank {rank}" for step, rank in places[:2])
        clauses.append(f"sample {repeated[0]}{others} came more than once, {where}")
    return ", and ".join(clauses)


class Ledger:
    """Writes a run's ledger. Pages that a full disk does not take wait in memory; training goes on."""

    def __init__(
        self,
        path: Path | None,
        world: World,
        *,
        samples: int,
        accumulation: int,
        steps_per_epoch: int,
        devices: int = 1,
    ) -> None:
        """Open the ledger at `path` (*collective*). A continued run has rewound it before.

        `path` counts on rank 0; None is no file. `samples` are those of the training set, `devices` those of each rank.
        Raises `RequestError`, on every rank, for a file that cannot be written, or is torn or damaged.
        """
        self.cost_s = 0.0
        """Seconds that this rank spent in the collective methods."""
        self.trouble = ""
        """Why pages wait, in the system's words; empty where none does."""
        self._world = world
        self._samples, self._steps_per_epoch = samples, steps_per_epoch
        self._accumulation, self._devices = accumulation, devices
        self._notes: Notes = []
        self._evaluated: list[Indices] = []
        self._pages: list[Page] = []
        """Those of the epoch under way, on rank 0."""
        self._file: Appended | None = None
        self._whole_epochs = self._evaluations = 0  # that were judged; epochs are counted on rank 0
        self._fault = ""
        world.together(lambda: self._open(path) if world.is_main and path is not None else None)

    def _open(self, path: Path) -> None:
        for page in read(path) if path.exists() else ():
            self._count(page)
        try:
            self._file = Appended(path)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}; give another --output.") from error

    @property
    def waiting(self) -> int:
        """The number of pages not yet on disk; 0 beyond rank 0."""
        return 0 if self._file is None else len(self._file.waiting)

    def add(self, step: int, indices: Indices) -> None:
        """Record that this rank computes samples `indices` in `step`. (n,), n may be 0; steps count from 1."""
        self._notes.append((step, indices.copy()))  # the copy: a view would keep a whole chunk of the order in memory

    def add_evaluated(self, indices: Indices) -> None:
        """Record that this rank evaluates the samples at `indices` (n,)."""
        self._evaluated.append(indices.copy())

    def flush(self, epoch: int) -> None:
        """Write the recorded steps, all of `epoch`, as one page (*collective*)."""
        notes, self._notes = self._notes, []
        self._keep(TRAIN, epoch, self._samples, notes)

    def end_evaluation(self, epoch: int, step: int, samples: int) -> None:
        """Write the evaluation after `step` as one page (*collective*). Of `samples` samples, in `epoch`.

        Raises `ProofError`, on every rank, unless each sample was evaluated exactly once.
        """
        self._evaluations += 1
        notes, self._evaluated = [(step, indices) for indices in self._evaluated], []
        page = self._keep(EVAL, epoch, samples, notes)
        found = _finding([page], samples) if page else "nothing of it was noted"
        told = "The evaluation did not take each sample exactly once, as planned"
        self._judge(found, f"the evaluation after step {step}", told)

    def end_epoch(self, epoch: int, expected: int) -> None:
        """Write the recorded steps, and judge `epoch` (*collective*).

        Raises `ProofError`, on every rank, unless each sample has come exactly once. `expected` is the number of
        samples due: fewer than the set where an incomplete last batch is left out. Where the epoch's beginning is not
        recorded, only repeated samples count.
        """
        self.flush(epoch)
        found, pages = "no step of it was noted", self._pages
        if pages and pages[0].epoch == epoch:
            is_whole = pages[0].first_step == epoch * self._steps_per_epoch + 1
            self._whole_epochs += is_whole
            found = _finding(pages, expected if is_whole else None)
        self._judge(found, f"epoch {epoch}", "Not each sample was trained on exactly once")

    def proof(self) -> Check:
        """Return the check's outcome so far."""
        times = self._whole_epochs + self._evaluations
        epochs, evaluations = counted(self._whole_epochs, "whole epoch"), counted(self._evaluations, "evaluation")
        lost = f"; {self.waiting} pages could not be written ({self.trouble})" if self.waiting else ""
        return Check(
            name="ledger",
            claim=CLAIM,
            outcome=Check.FAILS if self._fault else Check.HOLDS if times else Check.OPEN,
            times=times,
            tolerance="exactly",
            found=f"{self._fault or f'{epochs} and {evaluations} were asked'}{lost}",
            cost_s=self.cost_s,
        )

    def close(self) -> None:
        """Write the waiting pages and sync the file. `waiting` then counts the lost ones."""
        if self._file is not None:
            self._attempt(self._file.close)

    def _judge(self, finding: str, of: str, told: str) -> None:
        """Raise `ProofError` for rank 0's `finding`, if any (*collective*)."""
        begun_s = time.perf_counter()
        found: str = self._world.gather(finding)[0]
        self.cost_s += time.perf_counter() - begun_s
        if found:
            self._fault = f"{of}: {found}"
            raise ProofError(
                f"{told}, by {NAME}: {self._fault}. The data's order or its loader differs from rank to rank; "
                "lockstep verify run tells where."
            )

    def _keep(self, kind: str, epoch: int, samples: int, notes: Notes) -> Page | None:
        """Write all ranks' notes as one page (*collective*). Returns it on rank 0, if not empty."""
        begun_s = time.perf_counter()
        page = None
        if (gathered := _gathered(self._world, notes)) is not None:
            first_step, counts, indices = gathered
            ranks, devices = self._world.size, self._devices
            page = Page(kind, epoch, first_step, ranks, self._accumulation, samples, counts, indices, devices=devices)
            self._count(page)
            if self._file is not None:
                self._attempt(self._file.write, page.encode())
        self.cost_s += time.perf_counter() - begun_s
        return page

    def _count(self, page: Page) -> None:
        if page.kind == TRAIN:
            if self._pages and page.epoch != self._pages[0].epoch:
                self._pages = []
            _add(page, self._pages)

    def _attempt(self, action: Callable[..., None], *data: bytes) -> None:
        self.trouble = ""
        try:
            action(*data)
        except OSError as error:
            self.trouble = error.strerror or str(error)


def _gathered(world: World, notes: Notes) -> tuple[int, npt.NDArray[np.uint32], Indices] | None:
    """Gather all ranks' notes on rank 0 (*collective*). First step, counts (steps, ranks), all indices.

    None on the other ranks, and where nothing was noted.
    """
    sizes = np.array([(step, len(indices)) for step, indices in notes], np.int64).reshape(-1, 2)
    own = np.concatenate([np.empty(0, np.int64), *(indices for _, indices in notes)])
    by_note, by_rank = [world.ragged(torch.from_numpy(each)) for each in (sizes, own)]
    if not world.is_main:
        return None
    steps = [np.repeat(*each.numpy().T) for each in by_note]  # of each rank's samples
    order = np.concatenate(steps).argsort(kind="stable")  # by step, then by rank, then as the rank computed them
    if not len(order):
        return None
    first, last = (int(np.concatenate(steps)[at]) for at in order[[0, -1]])
    counts = np.stack([np.bincount(each - first, minlength=last - first + 1) for each in steps], axis=1)
    return first, counts.astype(np.uint32), torch.cat(by_rank).numpy()[order]


# ---- afterwards


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan of a run and, where known, its outcome."""

    global_batch: int
    drop_last: bool = False
    order: str = ""  # in which an epoch visits its samples: SHUFFLED by the `seed`, or ASCENDING; else unknown
    seed: int = 0
    is_own_loop: bool = False  # which may make one step of several batches
    first: int | None = None  # the first step in its ledger
    steps: int | None = None  # the optimizer steps that it made
    evaluations: Collection[int] = ()  # the steps after which it evaluated, from `first` on


def _deviations(pages: Sequence[Page], planned: Planned) -> Iterator[str]:
    """Yield an epoch's steps in which ranks deviated from the plan. Other samples, or another order."""
    epoch, samples = pages[0].epoch, pages[0].samples
    order: Callable[[int, int], Indices] = np.arange
    if planned.order == SHUFFLED:
        order = Order(samples, seed=planned.seed, epoch=epoch).indices
    for page in pages:
        plan = BatchPlan.solve(planned.global_batch, page.ranks, accumulation=page.accumulation, devices=page.devices)
        per_epoch = plan.steps(samples, drop_last=planned.drop_last)
        steps = np.split(page.indices, np.cumsum(page.counts.sum(axis=1, dtype=np.int64))[:-1])
        for step, (sizes, held) in enumerate(zip(page.counts, steps, strict=True), start=page.first_step):
            within = step - 1 - epoch * per_epoch
            begin, stop = plan.batch(within, samples) if 0 <= within < per_epoch else (0, 0)
            if len(held) != stop - begin:  # first: the plan of a page's unchecked numbers could take much memory
                told = f"{counted(len(held), 'sample')} of epoch {epoch}"
                yield f"step {step} has {told}, and {stop - begin:,} by the plan"
                continue
            counts, places = _layout(plan, len(held))
            right = order(begin, stop)[places]
            if not (np.array_equal(sizes, counts) and np.array_equal(held, right)):
                pairs = zip(np.split(held, np.cumsum(sizes)), np.split(right, np.cumsum(counts)), strict=True)
                ranks = [rank for rank, pair in enumerate(pairs) if not np.array_equal(*pair)]
                yield f"in step {step}, {ranks_named(ranks)} computed other samples than planned, or in another order"


@lru_cache(maxsize=16)
def _layout(plan: BatchPlan, count: int) -> tuple[Indices, Indices]:
    """Return each rank's share of a batch of `count`. Sizes (ranks,), and places by rank (count,)."""
    by_rank = [[at for share in plan.split(0, count, rank) for at in share] for rank in range(plan.ranks)]
    return np.array([len(own) for own in by_rank]), np.array([*chain.from_iterable(by_rank)], np.int64)


def check(path: Path, planned: Planned) -> Check:
    """Judge the ledger at `path` of a run that was `planned`.

    Each known step must be present once, and an evaluation after each step that had one; each evaluation and each whole
    epoch must hold each sample once (without a smaller last batch, as many samples as its steps take), and an epoch
    that is not whole none twice. Where the order is known, each rank's share of each step must be the planned one.

    Raises `RequestError` for a missing or damaged file. A last page that a kill cut short is left out; for a run whose
    steps are known, and which so has an end, that page is damage.
    """
    begun_s, torn = time.perf_counter(), ""
    evaluated: list[tuple[int, str]] = []

    def trained() -> Iterator[Page]:
        nonlocal torn
        try:
            for page in read(path):
                if page.kind == TRAIN:
                    yield page
                else:
                    evaluated.append((page.first_step, _finding([page], page.samples)))
        except TornError:
            if planned.steps is not None:
                raise
            torn = "; a last page that a kill cut short is left out"

    findings, epochs, first, due = list[str](), 0, 0, planned.first or 0
    plan = BatchPlan(global_size=planned.global_batch, ranks=1, accumulation=1)
    for epoch, group in groupby(trained(), key=lambda page: page.epoch):
        pages = list[Page]()
        for page in group:
            if not epochs and not pages:  # another folder's run may have begun the ledger
                first, due = page.first_step, min(due or page.first_step, page.first_step)
            if page.first_step != due:
                findings.append(f"step {page.first_step} follows step {due - 1}")
            due = page.last_step + 1
            _add(page, pages)
        epochs, begin = epochs + 1, pages[0]
        per_epoch = plan.steps(begin.samples, drop_last=planned.drop_last)
        # A ledger may begin in the middle of an epoch, and a run end there.
        is_whole = begin.first_step == epoch * per_epoch + 1 and due == (epoch + 1) * per_epoch + 1
        if finding := _finding(pages, min(begin.samples, per_epoch * planned.global_batch) if is_whole else None):
            findings.append(f"epoch {epoch}: {finding}")
        if planned.order in (SHUFFLED, ASCENDING) and (is_whole or not planned.is_own_loop):
            findings += _deviations(pages, planned)
    if due and planned.steps is not None and due != planned.steps + 1:
        findings.append(f"it ends with step {due - 1:,}, and the run made {counted(planned.steps, 'step')}")
    findings += [f"the evaluation after step {step}: {finding}" for step, finding in evaluated if finding]
    if absent := sorted({*planned.evaluations} - {step for step, _ in evaluated}):
        findings.append(f"{counted(len(absent), 'evaluation')} (the first after step {absent[0]}) not there")
    covered = f"{counted(epochs, 'epoch')} and {counted(len(evaluated), 'evaluation')}"
    covered += f", steps {first:,} to {due - 1:,}" * bool(first)
    covered += "; what was trained before is not recorded" * (first > 1)
    more = f"; and {counted(len(findings) - _NAMED, 'more finding')}" if len(findings) > _NAMED else ""
    found, times = ("; ".join(findings[:_NAMED]) or covered) + more + torn, epochs + len(evaluated)
    outcome, cost_s = Check.FAILS if findings else Check.HOLDS if times else Check.OPEN, time.perf_counter() - begun_s
    return Check(
        name="ledger", claim=CLAIM, outcome=outcome, times=times, tolerance="exactly", found=found, cost_s=cost_s
    )
