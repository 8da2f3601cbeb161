"""Check that each sample is computed exactly once per epoch and evaluation (`--ledger`).

Every rank counts the samples that it computes, in one byte per sample. At the end of an epoch or an evaluation, the
counts are summed over the ranks; there is no other communication.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ProofError, RequestError, counted, ranks_named
from ..record.checks import Check
from ..world.world import World

CLAIM = "Each epoch and each evaluation held each sample exactly once"
MOST_SAMPLES = 2**31
"""The largest data set whose samples are counted; each rank then holds 2 GiB of counts."""
_CHUNK = 1 << 20
"""Samples whose counts are summed over the ranks at a time."""
_MOST_NAMES = 4
"""Most samples that an error names."""
Indices = npt.NDArray[np.int64]


class SampleCounts:
    """Number of times that this rank has computed each sample."""

    def __init__(self, size: int) -> None:
        """Start at zero; indices are in [0, `size`). Raises `RequestError` for more than `MOST_SAMPLES`."""
        if size > MOST_SAMPLES:
            raise RequestError(
                f"--ledger counts the samples of up to {MOST_SAMPLES:,}, and these data have {size:,}; leave it out."
            )
        self._times = np.zeros(size, np.uint8)
        self._total = 0
        self._outside = 0
        """Indices beyond the data set."""

    @property
    def size(self) -> int:
        """The exclusive upper bound of the indices."""
        return len(self._times)

    def add(self, indices: Indices) -> None:
        """Count the samples at `indices` (n,); n may be 0."""
        inside = indices[(indices >= 0) & (indices < len(self._times))]
        np.add.at(self._times, inside, 1)
        self._total += len(indices)
        self._outside += len(indices) - len(inside)

    def violation(self, world: World, due: int) -> str:
        """Return a clause if all ranks' counts violate "`due` samples, each once", else "" (*collective*).

        `due` may be smaller than the data set, as with `drop_last`; any samples may then be absent.
        """
        size = len(self._times)
        absent, repeated = _Samples(), _Samples()
        for start in range(0, size, _CHUNK):
            times = torch.from_numpy(self._times[start : start + _CHUNK].astype(np.int32))
            summed = world.sum_(times).numpy()
            absent.add(start + np.flatnonzero(summed == 0))
            repeated.add(start + np.flatnonzero(summed > 1))
        local_counts = (self._total, self._outside, self._times[repeated.first].tolist())
        by_rank = world.gather(local_counts)
        total, outside = (sum(counts[column] for counts in by_rank) for column in (0, 1))
        distinct = size - absent.number
        clauses = []
        if repeated.number:
            ranks = [rank for rank, (*_, times) in enumerate(by_rank) if times[0]]
            example = f"sample {repeated.first[0]} on {ranks_named(ranks)}"
            clauses.append(f"{repeated} came more than once ({example})")
        if absent.number and due == size:
            clauses.append(f"{absent} did not come")
        elif distinct != due:
            clauses.append(f"{distinct:,} of {due:,} samples came")
        if outside:
            clauses.append(f"{counted(outside, 'number')} beyond the {size:,} samples came")
        if not clauses and total != due:  # a count of one byte wraps around after 255
            clauses.append(f"{total:,} samples came in place of {due:,}")
        return ", and ".join(clauses)

    def clear(self) -> None:
        """Reset all counts to zero."""
        self._times.fill(0)
        self._total = self._outside = 0


class _Samples:
    """The first of many samples, and their number."""

    def __init__(self) -> None:
        self.number = 0
        self.first = np.empty(0, np.int64)

    def add(self, indices: Indices) -> None:
        self.number += len(indices)
        self.first = np.concatenate([self.first, indices])[:_MOST_NAMES]

    def __str__(self) -> str:
        omitted = self.number - len(self.first)
        shown = f"sample{'s' * (self.number > 1)} {', '.join(map(str, self.first))}"
        return shown + f" and {omitted:,} more" * bool(omitted)


class SampleCheck:
    """Counts a run's samples; stops the run unless each is computed exactly once."""

    def __init__(self, world: World, size: int, *, resumed_samples: int = 0, trained: Iterable[Indices] = ()) -> None:
        """Count training samples with indices in [0, `size`).

        A run resumed within an epoch has already trained `resumed_samples` of the epoch's samples; this rank counts
        its part of them, `trained`.
        """
        self.cost_s = 0.0
        """Seconds that this rank has spent on these checks."""
        self._world, self._resumed_samples = world, resumed_samples
        self._counts = SampleCounts(size)
        self._batch: list[Indices] = []
        """Samples of the current global batch."""
        self._epochs = self._evaluations = 0
        self._fault = ""
        for indices in trained:
            self._counts.add(indices)

    def add(self, indices: Indices) -> None:
        """Note that this rank computes the training samples at `indices` (n,); n may be 0."""
        self._batch.append(indices)

    def end_batch(self) -> None:
        """Count the samples of the completed batch."""
        for indices in self._batch:
            self._counts.add(indices)
        self._batch.clear()

    def end_epoch(self, epoch: int, due: int, size: int | None = None) -> None:
        """Judge `epoch`, in which `due` samples were due (*collective*). Raises `ProofError` on every rank.

        The next one has indices in [0, `size`), by default as many as before.
        """
        self._batch.clear()  # of a batch that the user's loop left unfinished
        self._judge(self._counts, due, f"epoch {epoch}")
        self._counts.clear()
        if size is not None and size != self._counts.size:
            self._counts = SampleCounts(size)
        self._epochs += 1

    def end_evaluation(self, counts: SampleCounts, due: int, step: int) -> None:
        """Judge an evaluation of `due` samples after `step` (*collective*). Raises `ProofError` on every rank."""
        self._judge(counts, due, f"the evaluation after step {step}")
        self._evaluations += 1

    def _judge(self, counts: SampleCounts, due: int, part: str) -> None:
        start_s = time.perf_counter()
        violation = counts.violation(self._world, due)
        self.cost_s += time.perf_counter() - start_s
        if violation:
            self._fault = f"in {part}, {violation}"
            raise ProofError(
                f"Not every sample was computed exactly once: {self._fault}. The order of the data, or what a loader "
                "makes of it, differs from rank to rank or repeats; compare the samples that each rank reads."
            )

    def proof(self) -> Check:
        """Return the check's outcome so far."""
        times = self._epochs + self._evaluations
        covers = (
            f"{counted(self._epochs, 'epoch')} and {counted(self._evaluations, 'evaluation')} ended, and were counted"
        )
        if self._resumed_samples:
            covers += f"; {counted(self._resumed_samples, 'sample')} of an epoch came before the resume, by its order"
        return Check(
            name="samples",
            claim=CLAIM,
            outcome=Check.FAILS if self._fault else Check.HOLDS if times else Check.OPEN,
            times=times,
            tolerance="exactly",
            found=self._fault or covers,
            cost_s=self.cost_s,
        )
