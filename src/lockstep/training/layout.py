"""Position of a rank's samples in tensors: this rank's rows of those for the global micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from ..world.world import World


class Share(NamedTuple):
    """This rank's samples [start, start + size) of a global micro-batch of `total`.

    An empty share has one row, of a stand-in sample that does not count.
    """

    start: int
    size: int
    total: int

    @property
    def rows(self) -> int:
        """Number of samples that this rank computes."""
        return max(1, self.size)


class Layout(NamedTuple):
    """Samples along `dimension` of a tensor.

    For each k of `blocks`, there are k consecutive rows per sample: tokens flattened into the batch are one block of k,
    and two views joined by `torch.cat` two blocks of 1.
    """

    dimension: int
    blocks: tuple[int, ...]

    def full_shape(self, shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
        """Return the shape for the global micro-batch."""
        rows = sum(self.blocks) * share.total
        return (*shape[: self.dimension], rows, *shape[self.dimension + 1 :])

    def take(self, full: Tensor, share: Share) -> Tensor:
        """Return the share's rows of `full`."""
        parts = [full.narrow(self.dimension, offset, length) for offset, _, length in self._spans(share)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, self.dimension)

    def put(self, own: Tensor, full: Tensor, share: Share) -> Tensor:
        """Write the share's rows, `own`, into `full`; return `full`."""
        for offset, own_offset, length in self._spans(share):
            full.narrow(self.dimension, offset, length).copy_(own.narrow(self.dimension, own_offset, length))
        return full

    def gather(self, own: Tensor, share: Share, world: World) -> Tensor:
        """Return the tensor for the global micro-batch, from every rank's `own` (*collective*).

        Raises `RequestError` where the ranks' samples have different shapes.
        """
        outer = [str(own.dtype), *own.shape[: self.dimension], *own.shape[self.dimension + 1 :]]
        shapes = world.gather(outer)
        if any(shape != outer for shape in shapes):
            raise RequestError(
                f"draws='global' mixes samples of different ranks, and their shapes differ ({shapes[0]} on rank 0, "
                f"{next(shape for shape in shapes if shape != shapes[0])} on another); pad all samples to one shape."
            )
        full = own.new_zeros(self.full_shape(tuple(own.shape), share))
        if share.size:
            self.put(own, full, share)
        world.sum_(full.view(torch.uint8) if full.dtype == torch.bool else full)  # exact: one rank has each row
        return full

    def _spans(self, share: Share) -> Iterator[tuple[int, int, int]]:
        """Yield each block's offset in the global micro-batch's rows, its offset in the share's, and its length."""
        full = own = 0
        first = min(share.start, share.total - 1)  # a stand-in at the end has any row
        for k in self.blocks:
            yield full + k * first, own, k * share.rows
            full, own = full + k * share.total, own + k * share.rows


BY_SAMPLE = Layout(0, (1,))
"""One row per sample."""
