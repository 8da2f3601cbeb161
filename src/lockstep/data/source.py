"""Interface of data sets: batches of samples by index.

Variations, such as augmentation, are pure functions of (seed, epoch, sample index): a sample has the same bits in every
batch and on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.state import few
from ..config.schema import DataConfig
from ..errors import RequestError, counted
from ..world.world import World
from . import counter
from .folder import Look
from .ranks import is_changed

Indices = npt.NDArray[np.int64]
SPLITS = ("train", "validation", "test")
_HOLDOUT = 7
"""Key of --holdout's draws, distinct from those of augmentation and of the data sets."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of a data set's builder."""

    config: DataConfig
    seed: int
    world: World
    dtype: torch.dtype
    channels_last: bool
    look: Look | None = None
    """Of photographs; None for torchvision's."""


class Fetched(NamedTuple):
    """Samples of one share: x (n, *shape), y (n,) int64, and the indices that were read, (n,) int64."""

    x: Tensor
    y: Tensor
    indices: Indices


class Source(Protocol):
    """One split of a data set, of `classes` classes. `shape` and `dtype` are those of a sample."""

    classes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    skipped: tuple[str, ...] = ()
    """Files that were skipped because they cannot be decoded."""
    files: tuple[str, npt.NDArray[np.bytes_]] | None = None
    """A folder's name below --data-dir, and the samples' files below it (N,); a `Part` has those of its source."""

    def __len__(self) -> int: ...

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield each share's samples on the world's device. No share is empty."""

    def close(self) -> None:
        """End the source's workers, if any."""
        return


class _View(Source):
    """Samples of another source."""

    def __init__(self, source: Source) -> None:
        self.classes, self.shape, self.dtype, self.skipped = source.classes, source.shape, source.dtype, source.skipped
        self.files, self._source = source.files, source

    def __len__(self) -> int:
        return len(self._source)

    def close(self) -> None:
        self._source.close()


class Part(_View):
    """Samples of `source` at ascending `indices` (n,), renumbered from 0."""

    def __init__(self, source: Source, indices: Indices) -> None:
        super().__init__(source)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for x, y, read in self._source.stream((self.indices[share] for share in shares), epoch=epoch):
            positions = np.searchsorted(self.indices, read)
            # A sample of another part gets a number outside this part.
            is_member = self.indices[np.minimum(positions, len(self) - 1)] == read
            yield Fetched(x, y, np.where(is_member, positions, len(self) + read))


class Relabelled(_View):
    """`source` with labels `numbers[y]` in place of y. `numbers` is (classes,) int64."""

    def __init__(self, source: Source, numbers: Tensor) -> None:
        super().__init__(source)
        self._numbers = numbers
        if isinstance(source, Part):
            self.indices = source.indices

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for x, y, read in self._source.stream(shares, epoch=epoch):
            self._numbers = self._numbers.to(y.device)
            yield Fetched(x, self._numbers[y], read)


Make = Callable[[str, tuple[str, ...]], Source]
"""(split, variations) -> its source"""


@dataclass(frozen=True)
class Splits:
    """Splits of a data set, and the names of its classes, if any.

    `cautions` are messages to the user. `contents` has, for each split of a user's data set, a digest of its `labels`
    and signatures of some `samples`; the digest is of class names if there are any.
    """

    train: Source
    test: Source
    validation: Source | None = None
    names: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    contents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        request: Request,
        make: Make,
        *,
        validation: bool = False,
        names: tuple[str, ...] = (),
        labels: Indices | None = None,
    ) -> Splits:
        """Return the splits, with sources from `make`. `validation`: whether the data have a validation split.

        --holdout takes one from the training data: a share of each class if the training set's `labels` (N,) are known.
        Raises `RequestError` if there are both.
        """
        augment = request.config.variations
        train, test = make("train", augment), make("test", ())
        held_out = make("validation", ()) if validation else None
        if request.config.holdout:
            train_indices, held_indices = hold_out(
                request.config, request.seed, len(train), labels, has_validation=validation
            )
            full_train = make("train", ()) if augment else train
            train, held_out = Part(train, train_indices), Part(full_train, held_indices)
        return cls(train, test, held_out, names)

    def matched(self, names: Sequence[str], origin: str, advice: str = "") -> Splits:
        """Return the splits with classes numbered as in `names`, those that `origin` was trained on.

        Returns the same splits if either side has no names. Raises `RequestError` for classes of other names.
        """
        if not (names and self.names) or [*names] == [*self.names]:
            return self
        if sorted(names) != sorted({*self.names}):
            lists = (
                few([name for name in one if name not in other] or [*one], 5)
                for one, other in ((names, self.names), (self.names, names))
            )
            raise RequestError(
                f"{origin} was trained on classes of other names than these data have, {' in place of '.join(lists)}; "
                f"give it data whose classes have the same names{advice}."
            )
        numbers = torch.tensor([names.index(name) for name in self.names])
        train, test = (Relabelled(source, numbers) for source in (self.train, self.test))
        validation = self.validation and Relabelled(self.validation, numbers)
        return replace(self, train=train, test=test, validation=validation, names=tuple(names))

    def compared(self, contents: Mapping[str, Mapping[str, Any]]) -> Splits:
        """Return the splits, with a caution if they differ from `contents`, a run's training data."""
        changed = [
            split
            for split in self.contents.keys() & contents.keys()
            if is_changed(contents[split], self.contents[split])
        ]
        if not changed:
            return self
        text = f"the run had other samples or labels in its {' and '.join(sorted(changed))} data, or in another order"
        return replace(self, cautions=(*self.cautions, text))

    @property
    def judged(self) -> Source:
        """The split that chooses the best weights: validation, else test."""
        return self.test if self.validation is None else self.validation

    @property
    def best_on(self) -> str:
        """Name of the split that chooses the best weights."""
        return "test set" if self.validation is None else "validation set"

    def close(self) -> None:
        """Close all sources."""
        for source in (self.train, self.test, self.validation):
            if source is not None:
                source.close()


def hold_out(
    config: DataConfig, seed: int, samples: int | None, labels: Indices | None = None, *, has_validation: bool
) -> tuple[Indices, Indices]:
    """Return the indices that --holdout leaves to training, and those that it holds out.

    It selects samples by a random number, a function of (seed, index). If the `labels` (N,) are known, it holds out the
    samples of each class with the lowest numbers: at least one, and at most all but one. Raises `RequestError` for a
    stream, whose number of `samples` is None, for data with their own validation set, and if it holds out no sample or
    all.
    """
    share = config.holdout
    if has_validation or samples is None:
        reason = "already has a validation set" if has_validation else "is a stream, whose samples have no index"
        raise RequestError(f"--holdout {share:g}: --data {config.name} {reason}; leave it out.")
    numbers = counter.uniform(counter.bits(counter.keys(1, seed, _HOLDOUT), np.arange(samples))[0])
    is_held = numbers < share
    if labels is not None and 0 < round(share * samples) < samples:
        _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        order = np.lexsort((numbers, class_of))  # grouped by class
        place = np.arange(samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        wanted = np.where(sizes > 1, np.rint(share * sizes).clip(1, np.maximum(sizes - 1, 1)), 0)
        is_held[order] = place < np.repeat(wanted, sizes)
    train_indices, held_indices = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    if not (len(train_indices) and len(held_indices)):
        amount = f"{'all' if len(held_indices) else 'none'} of {counted(samples, 'sample')}"
        raise RequestError(f"--holdout {share:g} holds out {amount}; give another share.")
    return train_indices, held_indices
