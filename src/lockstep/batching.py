"""The global batch, shared out: global batch → global micro-batches → each rank's share of them.

The user's number is the global batch. Accumulation A cuts it into A *global* micro-batches, because the
statistics of BatchNorm are those of one global micro-batch: A is part of the model and does not change with the
world. Each global micro-batch is then shared out among the ranks. Both cuts are as even as they can be (sizes
differ by at most one), so that no batch size is illegal: with 10 samples on 4 ranks they hold 3, 3, 2 and 2.

Where a rank drives several devices, a global micro-batch is cut into a part for each device of the world, and a rank
has its devices' parts, which are neighbours: each device then has what it would have as a rank of its own. Cutting a
rank's share anew into as many parts, as evenly, larger ones first, gives just these parts.

A last batch of n < global samples is cut into ⌈n·A ÷ global⌉ micro-batches, so that it runs at about the
micro-batch size of the others; ranks that get no sample of it still take part in every collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

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

    `global_size` samples a step, cut into `accumulation` global micro-batches, each shared among `ranks` that drive
    `devices` devices each.
    """

    global_size: int
    ranks: int
    accumulation: int
    devices: int = 1

    @classmethod
    def solve(
        cls,
        global_size: int,
        ranks: int,
        *,
        micro_size: int | None = None,
        accumulation: int | None = None,
        devices: int = 1,
    ) -> BatchPlan:
        """Return the plan for a global batch on `ranks` ranks of `devices` devices each.

        `micro_size` is the most samples that a rank computes at once; the fewest global micro-batches that keep to
        it are taken. `accumulation` names their number instead. With neither there is one.

        Raises `RequestError` where the batch cannot be shared out so that each rank has work.
        """
        fewest, whom = _fewest(ranks, devices), _ranks_of(ranks, devices)
        if global_size < fewest:
            raise RequestError(
                f"Global batch {global_size} does not split into {whom}: each needs at least one sample; "
                f"use --batch {fewest} or more, or at most {_ranks_of(most_ranks(global_size, devices), devices)}."
            )
        if accumulation is None:
            accumulation = 1 if micro_size is None else -(-global_size // _largest_micro(micro_size, ranks, devices))
        if accumulation > global_size // fewest:
            if micro_size is None:
                most = global_size // fewest
                instead = f"--accumulate {most} or less, or --batch {accumulation * fewest} or more"
            else:
                instead = _instead_of(micro_size, global_size, ranks, devices)
            raise RequestError(
                f"Global batch {global_size} does not split into {accumulation} micro-batches on {whom}: each rank "
                f"needs at least one sample of each; use {instead}."
            )
        return cls(global_size=global_size, ranks=ranks, accumulation=accumulation, devices=devices)

    @property
    def largest_share(self) -> int:
        """The most samples that a rank computes at once."""
        return len(self._share(*_cut(0, self.global_size, self.accumulation, 0), 0))  # the larger ones come first

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
        return [self._share(*_cut(start, stop, micros, micro), rank) for micro in range(micros)]

    def shares(
        self, samples: int, rank: int, *, first: int = 0, drop_last: bool = False
    ) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (start, stop, total, last) of the rank's shares of an epoch of `samples`, from step `first` on.

        [start, stop) are positions of the epoch's order, `total` is the samples of the whole batch, of all ranks and
        micro-batches, and `last` says whether it is the batch's last micro-batch.
        """
        whole = self.split(0, self.global_size, rank)  # the same for each batch but the last: cut once
        for step in range(first, self.steps(samples, drop_last=drop_last)):
            begin, end = self.batch(step, samples)
            total = end - begin
            parts = whole if total == self.global_size else self.split(0, total, rank)
            for part in parts:
                yield begin + part.start, begin + part.stop, total, part is parts[-1]

    def _share(self, start: int, stop: int, rank: int) -> Share:
        """Return the rank's share of the global micro-batch [start, stop): the parts of its devices."""
        parts, first = self.ranks * self.devices, rank * self.devices
        return Share(_cut(start, stop, parts, first)[0], _cut(start, stop, parts, first + self.devices - 1)[1])

    def leaves_ranks_empty(self, samples: int, *, drop_last: bool = False) -> bool:
        """Return whether a share of an epoch of `samples` samples is empty, as its last batch's can be."""
        last = samples % self.global_size
        if last == 0 or drop_last:
            return False
        return last // self.micros(last) < _fewest(self.ranks, self.devices)  # the smallest of its micro-batches

    def __str__(self) -> str:
        """Return the line that is printed once: `global batch 256 = 4 ranks × 2 micro-batches × 32`."""
        whole = self.ranks * self.devices * self.accumulation
        each = str(self.global_size // whole)
        if self.global_size % whole:
            each += f" or {self.global_size // whole + 1}"
        ranks = counted(self.ranks, "rank")
        if self.devices > 1:
            ranks += f" × {counted(self.devices, 'device')}"
        micros = counted(self.accumulation, "micro-batch")
        return f"global batch {self.global_size} = {ranks} × {micros} × {each}"


def most_ranks(micro: int, devices: int = 1) -> int:
    """Return among how many ranks of `devices` devices each a global micro-batch of `micro` samples can be shared."""
    return (micro - 1) // devices + 1


def _fewest(ranks: int, devices: int) -> int:
    """Return the samples of the smallest global micro-batch of which every rank has one."""
    return (ranks - 1) * devices + 1


def _largest_micro(share: int, ranks: int, devices: int) -> int:
    """Return the samples of the largest global micro-batch of which no rank has more than `share`."""
    each, more = divmod(share, devices)
    return ranks * devices * each + more


def _instead_of(micro_size: int, global_size: int, ranks: int, devices: int) -> str:
    """Return, for a sentence, what can be asked for where keeping to `micro_size` leaves a rank without a sample."""

    def fits(size: int) -> bool:
        return global_size // -(-global_size // _largest_micro(size, ranks, devices)) >= _fewest(ranks, devices)

    larger = f"--micro-batch {next(filter(fits, count(micro_size + 1)))} or more"
    most = _largest_micro(micro_size, ranks, devices)
    if most < _fewest(ranks, devices):  # whatever the batch
        return larger
    below = global_size // most * most
    return f"--batch {below} or {below + most}, or {larger}"


def _ranks_of(ranks: int, devices: int) -> str:
    return counted(ranks, "rank") + (f" of {devices} devices" if devices > 1 else "")
