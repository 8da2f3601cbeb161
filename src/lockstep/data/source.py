"""What the engine asks of a data set: batches for the sample indices that it names.

The engine decides which samples a rank computes (the epoch's order, cut by the batch plan); a source only fetches
them. Whatever it adds, such as augmentation, is a pure function of (seed, epoch, sample index), so that a batch
can be split in any way, on any rank, and its samples stay the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..config.schema import DataConfig
from ..errors import RequestError, counted
from ..world.world import World
from . import counter

Indices = npt.NDArray[np.int64]
Pair = tuple[Tensor, Tensor]
SPLITS = ("train", "validation", "test")
_HOLDOUT = 7
"""Keeps the draws of --holdout apart from those of augmentation and of the data sets."""


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


class Part:
    """The samples of the source `whole` at `indices` (n,), which rise; here they are numbered from 0."""

    def __init__(self, whole: Source, indices: Indices) -> None:
        self.classes, self.shape, self.dtype, self.skipped = whole.classes, whole.shape, whole.dtype, whole.skipped
        self.indices = indices
        self._whole = whole

    def __len__(self) -> int:
        return len(self.indices)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield what `whole` does for the samples of each share, under this part's own numbers."""
        for x, y, read in self._whole.stream((self.indices[share] for share in shares), epoch=epoch):
            at = np.searchsorted(self.indices, read)
            # A sample that is none of this part's gets a number that none has.
            is_ours = self.indices[np.minimum(at, len(self) - 1)] == read
            yield Fetched(x, y, np.where(is_ours, at, len(self) + read))

    def close(self) -> None:
        """Close the whole source."""
        self._whole.close()


@dataclass(frozen=True)
class Splits:
    """A data set: what is trained on, and what is held out."""

    train: Source
    test: Source
    validation: Source | None = None
    """What the best weights are chosen on; None where they are chosen on the test set."""
    names: tuple[str, ...] = ()
    """Of the classes; empty where the data set has none."""

    @classmethod
    def of(
        cls,
        wish: Wish,
        make: Callable[[str, tuple[str, ...]], Source],
        *,
        validation: bool = False,
        names: tuple[str, ...] = (),
    ) -> Splits:
        """Return the sources that `make(split, variations)` gives; with --holdout, validation is cut off training.

        `validation` says whether there is such a split. Raises `RequestError` where --holdout cannot be honoured.
        """
        augment, share = wish.config.augment, wish.config.holdout
        train, test = make("train", augment), make("test", ())
        held_out = make("validation", ()) if validation else None
        if share:
            if validation:
                raise RequestError(
                    f"--holdout {share:g}: --data {wish.config.name} has a validation set of its own; leave it out."
                )
            held = hold_out(len(train), wish.seed, share)
            whole = make("train", ()) if augment else train
            train, held_out = Part(train, np.flatnonzero(~held)), Part(whole, np.flatnonzero(held))
        return cls(train, test, held_out, names)

    @property
    def judged(self) -> Source:
        """What the best weights are chosen on: the validation set, or the test set where there is none."""
        return self.test if self.validation is None else self.validation

    @property
    def best_on(self) -> str:
        """The name of that set."""
        return "test set" if self.validation is None else "validation set"

    def close(self) -> None:
        """Close all sources."""
        for source in (self.train, self.test, self.validation):
            if source is not None:
                source.close()


def is_held_out(samples: int, seed: int, share: float) -> npt.NDArray[np.bool_]:
    """Return which samples (samples,) --holdout takes: each by a number drawn from (seed, index) alone.

    So a sample stays where it is when others are added behind it; the share is met on average.
    """
    drawn = counter.uniform(counter.bits(counter.keys(1, seed, _HOLDOUT), np.arange(samples))[0])
    return drawn < share


def hold_out(samples: int, seed: int, share: float) -> npt.NDArray[np.bool_]:
    """Return what `is_held_out` does. Raises `RequestError` where that is none of the samples, or all."""
    held = is_held_out(samples, seed, share)
    if not 0 < np.count_nonzero(held) < samples:
        said = f"{'all' if held.any() else 'none'} of {counted(samples, 'sample')}"
        raise RequestError(f"--holdout {share:g} holds out {said}; give another share.")
    return held


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What `sets.build` is asked for, handed on to the one who builds the set."""

    config: DataConfig
    seed: int
    world: World
    dtype: torch.dtype
    channels_last: bool
