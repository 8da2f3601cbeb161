"""Split the global batch into global micro-batches, and each of these into the ranks' shares.

BatchNorm's statistics are those of one global micro-batch: the number of micro-batches is part of the model, and stays
when the world changes. Each micro-batch is cut into one part per device of the world; a rank has the adjacent parts of
its devices. All cuts are as even as possible, larger parts first: 10 samples on 4 ranks are 3, 3, 2 and 2. The
micro-batches of an epoch's last batch are about as large as the others. A rank may then have no sample: it computes the
batch's first sample instead, with a weight of zero, so that it takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .errors import RequestError, counted


class Share(NamedTuple):
    """A rank's share of one global micro-batch: positions [start, stop) of the epoch's order.

    If `size` is 0, the range is that of the global batch's first sample, which stands in.
    """

    start: int
    stop: int
    size: int
    """Samples of the share; 0 if a stand-in is computed."""
    total: int
    """Samples of the global batch."""
    last: bool
    """Whether this is the global batch's last micro-batch."""
    step: int
    """Index of the global batch in the epoch."""
    micro: int
    """Index of the micro-batch in the global batch."""
    row: int
    """Samples of the micro-batch on lower ranks."""
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
        """Plan a global batch of `accumulation` micro-batches, or the fewest of at most `micro_size` per rank.

        Raises `RequestError` if a device would have no sample of a micro-batch.
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
                "(a resumed run keeps its batch and its micro-batches)."
            )
        return cls(global_size=global_size, ranks=ranks, accumulation=accumulation, devices=devices)

    @property
    def largest_share(self) -> int:
        """The largest number of samples that a rank computes at once."""
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
        full_batch = self.batch_shares(self.global_size, rank)  # the same for every batch but the last: split once
        for step in range(first, self.steps(samples, drop_last=drop_last)):
            begin, end = self.batch(step, samples)
            total = end - begin
            for share in full_batch if total == self.global_size else self.batch_shares(total, rank):
                yield share._replace(start=begin + share.start, stop=begin + share.stop, step=step)

    def evaluation(self, samples: int, rank: int) -> Iterator[Share]:
        """Yield the rank's share of each batch of an evaluation of `samples`, in their order.

        A batch has one micro-batch. No share is empty unless there are fewer samples than ranks.
        """
        batches = max(1, min(-(-samples // self.global_size), samples // self.ranks)) if samples else 0
        for batch in range(batches):
            batch_range = _cut(range(samples), batches, batch)
            share = _cut(batch_range, self.ranks, rank)
            span = share or batch_range[:1]
            row = share.start - batch_range.start
            yield Share(span.start, span.stop, len(share), len(batch_range), True, batch, 0, row, len(batch_range))

    def batch_shares(self, total: int, rank: int) -> list[Share]:
        """Return the rank's shares of a batch of `total` samples. Positions count from the batch's beginning."""
        micros, shares = self._micros(total), list[Share]()
        for micro in range(micros):
            block = _cut(range(total), micros, micro)
            share = self._share(block, rank)
            span = share or range(1)
            row = share.start - block.start
            is_last = micro + 1 == micros
            shares.append(Share(span.start, span.stop, len(share), total, is_last, 0, micro, row, len(block)))
        return shares

    def _micros(self, samples: int) -> int:
        return max(1, -(-samples * self.accumulation // self.global_size))

    def _share(self, micro: range, rank: int) -> range:
        parts, first = self.ranks * self.devices, rank * self.devices
        return range(_cut(micro, parts, first).start, _cut(micro, parts, first + self.devices - 1).stop)

    def __str__(self) -> str:
        """Return the plan in one line, such as `global batch 256 = 4 ranks × 2 micro-batches × 32`."""
        size, extra = divmod(self.global_size, self.ranks * self.devices * self.accumulation)
        ranks = counted(self.ranks, "rank") + (f" × {counted(self.devices, 'device')}" if self.devices > 1 else "")
        micros = counted(self.accumulation, "micro-batch")
        return f"global batch {self.global_size} = {ranks} × {micros} × {size}" + (f" or {size + 1}" if extra else "")


def _cut(positions: range, parts: int, part: int) -> range:
    base, extra = divmod(len(positions), parts)
    begin = positions.start + part * base + min(part, extra)
    return range(begin, begin + base + (part < extra))


def _largest_micro(share: int, ranks: int, devices: int) -> int:
    """Return the largest global micro-batch with at most `share` samples per rank."""
    size, remainder = divmod(share, devices)
    return ranks * devices * size + remainder
