"""The global batch's split: global micro-batches, then each rank's share.

The statistics of BatchNorm are those of one global micro-batch: their number is part of the model, and stays when the
world changes. Each is cut into a part for each device of the world; a rank has its devices' parts, which are
neighbours. All cuts are as even as they can be, the larger parts first: 10 samples on 4 ranks are 3, 3, 2 and 2. An
epoch's last batch has micro-batches about as large as the others'. Ranks may then have no sample: such a rank computes
the batch's first one instead, which counts nothing, so that it takes part in all that ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .errors import RequestError, counted


class Share(NamedTuple):
    """A rank's share of one global micro-batch: positions [start, stop) of the epoch's order.

    Where `size` is 0, the global batch's first sample stands in.
    """

    start: int
    stop: int
    size: int
    """Samples that count."""
    total: int
    """Samples of the whole global batch."""
    last: bool
    """Whether this is the global batch's last micro-batch."""
    step: int
    """The global batch, from the epoch's beginning."""
    micro: int
    """The micro-batch of the global batch."""
    row: int
    """Samples of the micro-batch that lower ranks have."""
    rows: int
    """Samples of the micro-batch on all ranks."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """A global batch's split: `accumulation` micro-batches among `ranks` of `devices` each."""

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
        """Plan a global batch. By `accumulation` micro-batches, or the fewest of at most `micro_size` samples a rank.

        Raises `RequestError` where a device would have no sample of a micro-batch.
        """
        parts = ranks * devices
        if accumulation is None:
            accumulation = 1 if micro_size is None else -(-global_size // _largest_micro(micro_size, ranks, devices))
        if global_size < accumulation * parts:
            ways = [f"a batch of {parts if micro_size else accumulation * parts} or more"]
            if global_size >= parts:
                ways = ["a larger --micro-batch"] if micro_size else [*ways, "a smaller --accumulate"]
            ways += ["fewer devices"] if parts > 1 else []
            raise RequestError(
                f"Global batch {global_size} does not split into {counted(accumulation, 'micro-batch')} on "
                f"{counted(parts, 'device')}: each device needs at least one sample of each; use {' or '.join(ways)} "
                "(a run that is continued keeps its batch and its micro-batches)."
            )
        return cls(global_size=global_size, ranks=ranks, accumulation=accumulation, devices=devices)

    @property
    def largest_share(self) -> int:
        """The most samples that a rank computes at once."""
        return len(self.split(0, self.global_size, 0)[0])

    def steps(self, samples: int, *, drop_last: bool = False) -> int:
        """Return the number of optimizer steps in an epoch of `samples` samples."""
        return samples // self.global_size if drop_last else -(-samples // self.global_size)

    def batch(self, step: int, samples: int) -> tuple[int, int]:
        """Return [start, stop) of a step's positions in the epoch's order. Steps count from 0."""
        start = step * self.global_size
        return start, min(start + self.global_size, samples)

    def split(self, start: int, stop: int, rank: int) -> list[range]:
        """Return the rank's share of each micro-batch. The batch has positions [start, stop); a share may be empty."""
        micros = self._micros(stop - start)
        return [self._share(_cut(range(start, stop), micros, micro), rank) for micro in range(micros)]

    def shares(self, samples: int, rank: int, *, first: int = 0, drop_last: bool = False) -> Iterator[Share]:
        """Yield the rank's share of each micro-batch of an epoch of `samples`, from step `first` on."""
        whole = self.batch_shares(self.global_size, rank)  # the same for each batch but the last: cut once
        for step in range(first, self.steps(samples, drop_last=drop_last)):
            begin, end = self.batch(step, samples)
            total = end - begin
            for share in whole if total == self.global_size else self.batch_shares(total, rank):
                yield share._replace(start=begin + share.start, stop=begin + share.stop, step=step)

    def batch_shares(self, total: int, rank: int) -> list[Share]:
        """Return the rank's shares of a batch of `total` samples. Positions count from the batch's beginning."""
        micros, found = self._micros(total), list[Share]()
        for micro in range(micros):
            whole = _cut(range(total), micros, micro)
            own = self._share(whole, rank)
            read = own or range(1)
            row = own.start - whole.start
            found.append(Share(read.start, read.stop, len(own), total, micro + 1 == micros, 0, micro, row, len(whole)))
        return found

    def _micros(self, samples: int) -> int:
        return max(1, -(-samples * self.accumulation // self.global_size))

    def _share(self, micro: range, rank: int) -> range:
        parts, first = self.ranks * self.devices, rank * self.devices
        return range(_cut(micro, parts, first).start, _cut(micro, parts, first + self.devices - 1).stop)

    def __str__(self) -> str:
        """Return the plan in one line. `global batch 256 = 4 ranks × 2 micro-batches × 32`, for example."""
        each, more = divmod(self.global_size, self.ranks * self.devices * self.accumulation)
        ranks = counted(self.ranks, "rank") + (f" × {counted(self.devices, 'device')}" if self.devices > 1 else "")
        micros = counted(self.accumulation, "micro-batch")
        return f"global batch {self.global_size} = {ranks} × {micros} × {each}" + (f" or {each + 1}" if more else "")


def _cut(whole: range, parts: int, part: int) -> range:
    base, extra = divmod(len(whole), parts)
    begin = whole.start + part * base + min(part, extra)
    return range(begin, begin + base + (part < extra))


def _largest_micro(share: int, ranks: int, devices: int) -> int:
    """Return the largest global micro-batch with at most `share` samples a rank."""
    each, more = divmod(share, devices)
    return ranks * devices * each + more
