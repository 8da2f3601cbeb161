"""Position of a rank's rows in the tensors of a global micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from ..world.world import World


class Share(NamedTuple):
    """This rank's samples [start, start + size) of a global micro-batch of `total`.

    An empty share has the row of one stand-in sample, with a weight of zero.
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

    def put(self, local: Tensor, full: Tensor, share: Share) -> Tensor:
        """Write the share's rows, `local`, into `full`; return `full`."""
        for offset, local_offset, length in self._spans(share):
            full.narrow(self.dimension, offset, length).copy_(local.narrow(self.dimension, local_offset, length))
        return full

    def gather(self, local: Tensor, share: Share, world: World) -> Tensor:
        """Return the tensor for the global micro-batch, from every rank's rows `local` (*collective*).

        Raises `RequestError` if the ranks' samples have different shapes.
        """
        local_shape = [str(local.dtype), *local.shape[: self.dimension], *local.shape[self.dimension + 1 :]]
        shapes = world.gather(local_shape)
        if any(shape != local_shape for shape in shapes):
            raise RequestError(
                f"draws='global' mixes samples of different ranks, and their shapes differ ({shapes[0]} on rank 0, "
                f"{next(shape for shape in shapes if shape != shapes[0])} on another); pad all samples to one shape."
            )
        full = local.new_zeros(self.full_shape(tuple(local.shape), share))
        if share.size:
            self.put(local, full, share)
        world.sum_(full.view(torch.uint8) if full.dtype == torch.bool else full)  # exact: one rank has each row
        return full

    def _spans(self, share: Share) -> Iterator[tuple[int, int, int]]:
        """Yield each block's offset in the global micro-batch's rows, its offset in the share's, and its length."""
        full = local = 0
        first = min(share.start, share.total - 1)  # for a stand-in at the end, any row
        for k in self.blocks:
            yield full + k * first, local, k * share.rows
            full, local = full + k * share.total, local + k * share.rows


BY_SAMPLE = Layout(0, (1,))
"""One row per sample."""
