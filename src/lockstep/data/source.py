"""Interface of data sets: batches for given sample indices.

Variations, such as augmentation, are pure functions of (seed, epoch, sample index): a sample is the same bits in any
batch and on any rank.
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
from .ranks import is_changed

Indices = npt.NDArray[np.int64]
SPLITS = ("train", "validation", "test")
_HOLDOUT = 7
"""Keeps the draws of --holdout apart from those of augmentation and of the data sets."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of a data set's builder."""

    config: DataConfig
    seed: int
    world: World
    dtype: torch.dtype
    channels_last: bool


class Fetched(NamedTuple):
    """Samples of one share. x (n, *shape), y (n,) int64, and the indices that were read, (n,) int64."""

    x: Tensor
    y: Tensor
    indices: Indices


class Source(Protocol):
    """One split of a data set. `classes` is their number; `shape` and `dtype` are those of a sample."""

    classes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    skipped: tuple[str, ...] = ()
    """Files that were left out because they cannot be decoded."""
    files: tuple[str, npt.NDArray[np.bytes_]] | None = None
    """A folder's name below --data-dir, and the samples' files below it (N,); of a `Part`, those of the whole."""

    def __len__(self) -> int: ...

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield each share's samples on the world's device. No share is empty."""

    def close(self) -> None:
        """End the source's workers, if any."""
        return


class Part(Source):
    """Samples of `whole` at ascending `indices` (n,), renumbered from 0."""

    def __init__(self, whole: Source, indices: Indices) -> None:
        self.classes, self.shape, self.dtype, self.skipped = whole.classes, whole.shape, whole.dtype, whole.skipped
        self.indices, self._whole, self.files = indices, whole, whole.files

    def __len__(self) -> int:
        return len(self.indices)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for x, y, read in self._whole.stream((self.indices[share] for share in shares), epoch=epoch):
            at = np.searchsorted(self.indices, read)
            # A sample of another part gets a number that no sample of this one has.
            is_ours = self.indices[np.minimum(at, len(self) - 1)] == read
            yield Fetched(x, y, np.where(is_ours, at, len(self) + read))

    def close(self) -> None:
        self._whole.close()


class Relabelled(Source):
    """`source` with label `numbers[y]` in place of y. `numbers` are (classes,) int64."""

    def __init__(self, source: Source, numbers: Tensor) -> None:
        self.classes, self.shape, self.dtype, self.skipped = source.classes, source.shape, source.dtype, source.skipped
        self.files, self._source, self._numbers = source.files, source, numbers
        if isinstance(source, Part):
            self.indices = source.indices

    def __len__(self) -> int:
        return len(self._source)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for x, y, read in self._source.stream(shares, epoch=epoch):
            self._numbers = self._numbers.to(y.device)
            yield Fetched(x, self._numbers[y], read)

    def close(self) -> None:
        self._source.close()


Make = Callable[[str, tuple[str, ...]], Source]
"""(split, variations) -> its source"""


@dataclass(frozen=True)
class Splits:
    """Splits of a data set, and the classes' names if any.

    `cautions` are sentences to tell the user. `contents` are, by split of a user's data set, a digest of its `labels`,
    and signatures of some `samples`; labels are taken by name where there are names.
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
        """Return the sources that `make` gives. `validation` says whether the data have such a split.

        --holdout cuts one off training, a share of each class where the training set's `labels` (N,) are known. Raises
        `RequestError` where there are both.
        """
        cautions: tuple[str, ...] = ()
        augment = request.config.augment
        train, test = make("train", augment), make("test", ())
        held_out = make("validation", ()) if validation else None
        if request.config.holdout:
            kept, held = hold_out(request.config, request.seed, len(train), labels, has_validation=validation)
            if labels is not None and (alone := sorted({*labels[kept].tolist()} - {*labels[held].tolist()})):
                of_one = few([names[label] if label < len(names) else f"class {label}" for label in alone], 5)
                cautions = (f"the validation set has no sample of classes with a single one, which trains: {of_one}",)
            whole = make("train", ()) if augment else train
            train, held_out = Part(train, kept), Part(whole, held)
        return cls(train, test, held_out, names, cautions)

    def matched(self, names: Sequence[str], origin: str, advice: str = "") -> Splits:
        """Return the splits with labels that number the classes as `names` does: those that `origin` was trained on.

        Without names on either side these are the same splits. Raises `RequestError` for classes of other names.
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
        """Return the splits with a caution where they differ from `contents`, which a run was trained with."""
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
        """Set for choosing the best weights: validation, else test."""
        return self.test if self.validation is None else self.validation

    @property
    def best_on(self) -> str:
        """Name of the set for choosing the best weights."""
        return "test set" if self.validation is None else "validation set"

    def close(self) -> None:
        """Close all sources."""
        for source in (self.train, self.test, self.validation):
            if source is not None:
                source.close()


def hold_out(
    asked: DataConfig, seed: int, samples: int | None, labels: Indices | None = None, *, has_validation: bool
) -> tuple[Indices, Indices]:
    """Return the samples that --holdout leaves to training, and those it takes.

    Each by a number drawn from (seed, index) alone; of each class, where the `labels` (N,) are known, those of the
    lowest numbers: at least one, and at most all but one. Raises `RequestError` for a stream, whose number of `samples`
    is None, for data with a validation set of their own, and where it takes none of the samples, or all.
    """
    share = asked.holdout
    if has_validation or samples is None:
        why = "has a validation set of its own" if has_validation else "is a stream, whose samples have no index"
        raise RequestError(f"--holdout {share:g}: --data {asked.name} {why}; leave it out.")
    numbers = counter.uniform(counter.bits(counter.keys(1, seed, _HOLDOUT), np.arange(samples))[0])
    is_held = numbers < share
    if labels is not None and 0 < round(share * samples) < samples:
        _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        order = np.lexsort((numbers, class_of))  # class by class
        place = np.arange(samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        wanted = np.where(sizes > 1, np.rint(share * sizes).clip(1, np.maximum(sizes - 1, 1)), 0)
        is_held[order] = place < np.repeat(wanted, sizes)
    kept, held = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    if not (len(kept) and len(held)):
        found = f"{'all' if len(held) else 'none'} of {counted(samples, 'sample')}"
        raise RequestError(f"--holdout {share:g} holds out {found}; give another share.")
    return kept, held
