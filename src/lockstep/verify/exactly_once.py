"""Whether a run's ledger holds what it has to: each sample exactly once an epoch, where and when the plan says.

The pages are gone through several times, one at a time, so that a ledger of any length takes memory for the samples
of one epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from ..errors import counted
from ..proof import Check
from .ledger import Tally
from .pages import EVAL, TRAIN, Indices, Page, TornError, of_kind, places, read
from .planned import Planned, evaluated, trained

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
class Pages:
    """The pages of a file, read anew each time that they are gone through."""

    path: Path
    torn_ok: bool

    def __iter__(self) -> Iterator[Page]:
        return read(self.path, torn_ok=self.torn_ok)


def check(path: Path, planned: Planned) -> Check:
    """Return what there is to say of the ledger at `path` of a run that was `planned`.

    Raises `RequestError` for a file that is not there or is damaged. A last page that a kill cut short is none.
    """
    begun_s = time.perf_counter()
    torn = ""
    try:
        verdict = judge(Pages(path, False), planned)
    except TornError:
        torn = "; a last page that a kill cut short is left out"
        verdict = judge(Pages(path, True), planned)
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


def judge(pages: Iterable[Page], planned: Planned) -> Verdict:
    """Return what is wrong with `pages`, which are gone through several times: a sequence, or a file's.

    Asked is: whether each step is there once, between the first and the last that are known, and an evaluation after
    each step that had one; whether each whole epoch and each evaluation held each sample once (without a smaller last
    batch, as many samples as its steps take), and an epoch that is not whole none twice; and whether each rank
    computed in each step what `BatchPlan` and `Order` give it.
    """
    assert iter(pages) is not pages, "an iterator can be gone through once"
    spans = [(page.epoch, page.first_step, page.last_step) for page in of_kind(TRAIN, pages)]
    epochs = sorted({epoch for epoch, _, _ in spans})
    first_epoch, last_epoch = (epochs[0], epochs[-1]) if epochs else (0, 0)
    found = [
        *_changes(pages),
        *_steps(pages, planned),
        *_epochs(pages, planned, first_epoch, last_epoch),
        *_evaluations(pages, planned),
        *trained(pages, planned),
    ]
    return Verdict(
        findings=tuple(found),
        first_step=min((first for _, first, _ in spans), default=0),
        last_step=max((last for _, _, last in spans), default=0),
        first_epoch=first_epoch,
        last_epoch=last_epoch,
        epochs=len(epochs),
        evaluations=sum(page.kind == EVAL for page in pages),
    )


def _changes(pages: Iterable[Page]) -> Iterator[str]:
    """Yield where the data set changed, which stays as it is, whatever the world."""
    before: Page | None = None
    for page in of_kind(TRAIN, pages):
        if before is not None and page.samples != before.samples:
            yield (
                f"from step {page.first_step} on, the training set has {counted(page.samples, 'sample')}, and had "
                f"{before.samples:,}"
            )
        before = page


def _steps(pages: Iterable[Page], planned: Planned) -> Iterator[str]:
    """Yield which steps are missing between the first and the last, or there twice."""
    missing: list[tuple[int, int]] = []
    twice: list[tuple[int, int]] = []
    first, steps = planned.first, planned.steps
    last = None if first is None else first - 1
    if first is not None and (begin := next(of_kind(TRAIN, pages), None)) is not None and begin.first_step < first:
        last = None  # what lies before is there as well
    for page in of_kind(TRAIN, pages):
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


def _epochs(pages: Iterable[Page], planned: Planned, first_epoch: int, last_epoch: int) -> Iterator[str]:
    """Yield of each epoch why it did not hold each sample once."""
    told = 0
    for epoch, group in groupby(of_kind(TRAIN, pages), key=lambda page: page.epoch):
        tally, first, last = _tallied(group)
        # A ledger may begin in the middle of an epoch, and a run end there; in between, no epoch has an excuse.
        per_epoch = planned.steps_per_epoch(first)
        begun = epoch != first_epoch or first.first_step == epoch * per_epoch + 1
        ended = epoch != last_epoch or last.last_step >= (epoch + 1) * per_epoch
        # Each goes through all pages once more, and a check names a few findings.
        repeated = partial(_repeated, of_kind(TRAIN, pages, epoch)) if told < _PLACES else None
        if found := tally.finding(planned.samples_per_epoch(first) if begun and ended else None, repeated=repeated):
            told += 1
            yield f"epoch {epoch}: {found}"


def _evaluations(pages: Iterable[Page], planned: Planned) -> Iterator[str]:
    """Yield of each evaluation why it did not hold each sample once, or not on the rank that has it."""
    if missing := sorted({*planned.evaluations} - {page.first_step for page in of_kind(EVAL, pages)}):
        yield f"{counted(len(missing), 'evaluation')} (the first after step {missing[0]}) not there"
    for page in of_kind(EVAL, pages):
        tally, _, _ = _tallied([page])
        said = tally.finding(page.samples, repeated=partial(_repeated, [page])), evaluated(page)
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


def _repeated(pages: Iterable[Page], twice: Indices) -> str:
    """Return where in `pages` the first of the samples in `twice` came, and how many more came more than once."""
    sample, more = int(twice[0]), len(twice) - 1
    found = [place for page in pages for place in places(page, sample)]
    where = ", ".join(f"step {step} on rank {rank}" for _, step, rank in found[:_PLACES])
    where += ", …" * (len(found) > _PLACES)
    often_said = "twice" if len(found) == 2 else f"{len(found)} times"
    others = f" and {counted(more, 'more sample')} more than once" if more else ""
    return f"sample {sample} came {often_said} ({where}){others}"
