"""What the engine asks of a data set: batches for the sample indices that it names.

The engine decides which samples a rank computes (the epoch's order, cut by the batch plan); a source only fetches
them. Whatever it adds, such as augmentation, is a pure function of (seed, epoch, sample index), so that a batch
can be split in any way, on any rank, and its samples stay the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..config import DataConfig
from ..world import World

Indices = npt.NDArray[np.int64]
Pair = tuple[Tensor, Tensor]


class Fetched(NamedTuple):
    """The samples of one share, and which they are."""

    x: Tensor
    """(n, *shape)"""
    y: Tensor
    """(n,) int64"""
    indices: Indices
    """(n,) int64: those that were read, as whoever read them says; a ledger of what was asked for would prove nothing.
    """


class Source(Protocol):
    """One split of a data set."""

    @property
    def classes(self) -> int:
        """Number of classes; labels are 0 to classes - 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample: (C, H, W) for images."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers in x."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """Files that were left out because they cannot be decoded."""

    def __len__(self) -> int: ...

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield, for each share in order, its samples x (n, *shape), labels y (n,) int64 and indices.

        A share is an int64 array of sample indices, possibly empty. x has the dtype that was asked for, both lie on
        the world's device, and images are in channels_last memory where that was asked for.
        """

    def close(self) -> None:
        """End whatever the source keeps running."""


@dataclass(frozen=True)
class Splits:
    """A data set: what is trained on, and what is held out."""

    train: Source
    test: Source

    def close(self) -> None:
        """Close both sources."""
        self.train.close()
        self.test.close()


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What `sets.build` is asked for, handed on to the one who builds the set."""

    config: DataConfig
    seed: int
    world: World
    dtype: torch.dtype
    channels_last: bool
