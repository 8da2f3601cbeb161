"""The global batch, shared out: global batch → global micro-batches → each rank's share of them.

The user's number is the global batch. Accumulation A cuts it into A *global* micro-batches, because the
statistics of BatchNorm are those of one global micro-batch: A is part of the model and does not change with the
world. Each global micro-batch is then shared out among the ranks. Both cuts are as even as they can be (sizes
differ by at most one), so that no batch size is illegal: with 10 samples on 4 ranks they hold 3, 3, 2 and 2.

A last batch of n < global samples is cut into ⌈n·A ÷ global⌉ micro-batches, so that it runs at about the
micro-batch size of the others; ranks that get no sample of it still take part in every collective.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RequestError, counted


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of one global micro-batch that one rank computes: positions [start, stop) of the epoch's order."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def _cut(start: int, stop: int, parts: int, part: int) -> tuple[int, int]:
    """Return part `part` of [start, stop) cut into `parts`, the larger ones first."""
    base, extra = divmod(stop - start, parts)
    begin = start + part * base + min(part, extra)
    return begin, begin + base + (part < extra)


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How each optimizer step's samples are shared out.

    `global_size` samples a step, cut into `accumulation` global micro-batches, each shared among `ranks`.
    """

    global_size: int
    ranks: int
    accumulation: int

    @classmethod
    def solve(
        cls, global_size: int, ranks: int, *, micro_size: int | None = None, accumulation: int | None = None
    ) -> BatchPlan:
        """Return the plan for a global batch on `ranks` ranks.

        `micro_size` is the most samples that a rank computes at once; the fewest global micro-batches that keep to
        it are taken. `accumulation` names their number instead. With neither there is one.

        Raises `RequestError` where the batch cannot be shared out so that each rank has work.
        """
        if global_size < ranks:
            raise RequestError(
                f"Global batch {global_size} does not split into {ranks} ranks: each needs at least one sample; "
                f"use --batch {ranks} or more, or at most {counted(global_size, 'rank')}."
            )
        if accumulation is None:
            accumulation = 1 if micro_size is None else -(-global_size // (micro_size * ranks))
        if accumulation > global_size // ranks:
            most = global_size // ranks
            if micro_size is None:
                instead = f"--accumulate {most} or less, or --batch {accumulation * ranks} or more"
            else:  # it is 1: of any more, the fewest micro-batches that keep to it leave no rank without a sample
                instead = f"--batch {most * ranks} or {(most + 1) * ranks}, or --micro-batch 2 or more"
            raise RequestError(
                f"Global batch {global_size} does not split into {accumulation} micro-batches on "
                f"{counted(ranks, 'rank')}: each rank needs at least one sample of each; use {instead}."
            )
        return cls(global_size=global_size, ranks=ranks, accumulation=accumulation)

    def steps(self, samples: int, *, drop_last: bool = False) -> int:
        """Return the number of optimizer steps in an epoch of `samples` samples."""
        return samples // self.global_size if drop_last else -(-samples // self.global_size)

    def batch(self, step: int, samples: int) -> tuple[int, int]:
        """Return [start, stop): the positions of the epoch's order that step `step` (from 0) trains on."""
        start = step * self.global_size
        return start, min(start + self.global_size, samples)

    def micros(self, count: int) -> int:
        """Return the number of global micro-batches of a batch of `count` samples."""
        return max(1, -(-count * self.accumulation // self.global_size))

    def split(self, start: int, stop: int, rank: int) -> list[Share]:
        """Return the rank's share of each global micro-batch of the batch at positions [start, stop).

        Every rank gets the same number of shares, so that all meet in each collective; a share can be empty.
        """
        micros = self.micros(stop - start)
        return [Share(*_cut(*_cut(start, stop, micros, micro), self.ranks, rank)) for micro in range(micros)]

    def leaves_ranks_empty(self, samples: int, *, drop_last: bool = False) -> bool:
        """Return whether a share of an epoch of `samples` samples is empty, as its last batch's can be."""
        last = samples % self.global_size
        if last == 0 or drop_last:
            return False
        return last // self.micros(last) < self.ranks  # the smallest of its global micro-batches

    def __str__(self) -> str:
        """Return the line that is printed once: `global batch 256 = 4 ranks × 2 micro-batches × 32`."""
        whole = self.ranks * self.accumulation
        each = str(self.global_size // whole)
        if self.global_size % whole:
            each += f" or {self.global_size // whole + 1}"
        ranks = counted(self.ranks, "rank")
        micros = counted(self.accumulation, "micro-batch")
        return f"global batch {self.global_size} = {ranks} × {micros} × {each}"
