"""The samples of a user's map-style data set, read and checked one by one, in worker processes where there are some.

For each sample the generators are seeded from (seed, epoch, sample index), so that what the data set draws is the
same on any rank and in any worker.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import own
from ..errors import RequestError
from .augment import Augment
from .counter import UInt64
from .resident import Normalise, channels_first
from .seeding import Drawing, seed_generators, seeds
from .source import Indices, Pair

PURPOSE = {"train": 3, "test": 4, "function": 5, "validation": 6}
"""Keeps these draws apart from each other, and from those of the other data sets."""


def checked(name: str, split: str, index: int, sample: Any, classes: int) -> tuple[Tensor, int]:
    """Return the sample. Raises `RequestError` where it is not an (x tensor, label) of the classes."""
    if not isinstance(sample, tuple | list) or len(sample) != 2 or not isinstance(sample[0], torch.Tensor):
        raise RequestError(f"--data {name}: {split} sample {index} is not an (x tensor, label) pair.")
    try:
        given = sample[1].item() if isinstance(sample[1], torch.Tensor) else sample[1]
        label = int(given)
    except (TypeError, ValueError, RuntimeError):  # several numbers, a word, nothing
        given, label = None, 0
    if label != given:
        shown = " ".join(repr(sample[1]).split())[:80]
        raise RequestError(
            f"--data {name}: {split} sample {index} has label {shown}; give a whole number from 0 to {classes - 1}."
        )
    if not 0 <= label < classes:
        raise no_such_class(name, split, index, label, classes)
    return sample[0], label


def no_such_class(name: str, split: str, index: int, label: int, classes: int) -> RequestError:
    """Return the error for a sample whose label lies outside the classes."""
    return RequestError(
        f"--data {name}: {split} sample {index} has label {label}, but the classes are 0 to {classes - 1}."
    )


@dataclass(frozen=True)
class Module:
    """The user's module, which a worker that was not forked imports, from the current folder too, on receiving this."""

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (self.name,)


def _imported(name: str) -> Module:
    own.load("--data", name)
    return Module(name)


@dataclass(frozen=True)
class Samples:
    """What a worker runs: makes batches of a map-style data set's samples, whose randomness comes from `seed`."""

    module: Module
    """Before `dataset`, since fields are unpickled in order and its class is found in this module."""
    split: str
    seed: int
    dataset: Any
    classes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    drawing: Drawing = field(default_factory=Drawing)

    def __call__(self, epoch: int, share: Indices) -> Pair:
        """Return x (n, *shape) and y (n,)."""
        return self.drawing.read(
            lambda: self._read(share, None),
            lambda: self._read(share, seeds(share, self.seed, epoch, PURPOSE[self.split])),
        )

    def _read(self, share: Indices, own_seeds: UInt64 | None) -> Pair:
        dataset, indices = self.dataset, share.tolist()
        samples: list[Any] = []
        try:
            if own_seeds is None:
                for index in indices:
                    samples.append(dataset[index])  # what was read by then says where it failed
            else:
                for index, own_seed in zip(indices, own_seeds, strict=True):
                    seed_generators(own_seed)
                    samples.append(dataset[index])
        except BaseException as error:
            error.add_note(f"{self.split} sample {indices[len(samples)]} of --data {self.module.name}")
            raise
        # All at once: to look at each sample takes as long as a small net's step, and so does torch's default_collate.
        with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            xs, labels = zip(*samples, strict=True)
            x, given = torch.stack(xs), torch.stack(labels) if isinstance(labels[0], Tensor) else torch.tensor(labels)
            y = given.long()
            if x.shape == (len(share), *self.shape) and x.dtype == self.dtype and y.shape == (len(share),):
                low, high = map(int, y.aminmax())
                if low >= 0 and high < self.classes and (given is y or torch.equal(y.to(given.dtype), given)):
                    return x, y
        return self._checked(share, samples)

    def _checked(self, share: Indices, samples: list[Any]) -> Pair:
        """Return what torch does not collate, or raise `RequestError` for the first sample that is another kind."""
        name, y = self.module.name, torch.empty(len(share), dtype=torch.int64)
        x = torch.empty((len(share), *self.shape), dtype=self.dtype)
        for place, (index, sample) in enumerate(zip(share.tolist(), samples, strict=True)):
            found, y[place] = checked(name, self.split, index, sample, self.classes)
            if found.shape != self.shape or found.dtype != self.dtype:
                raise RequestError(
                    f"--data {name}: {self.split} sample {index} is {found.dtype} {tuple(found.shape)}, sample 0 is "
                    f"{self.dtype} {self.shape}; all must be alike."
                )
            x[place] = found
        return x, y


@dataclass(frozen=True)
class Finish:
    """Turns a worker's batch (n, *shape) on the device into what the engine wants."""

    dtype: torch.dtype
    channels_last: bool
    normalise: Normalise | None
    augment: Augment

    def __call__(self, x: Tensor, share: Indices, epoch: int) -> Tensor:
        if self.normalise is None:
            turned = self.channels_last and x.dim() == 4
            order = torch.channels_last if turned else torch.preserve_format
            return x.to(dtype=self.dtype if x.is_floating_point() else x.dtype, memory_format=order)
        draws = self.augment.draw(self.augment.keys(epoch), share)
        moved = self.augment.move(x.permute(0, 2, 3, 1).contiguous(), draws)
        return channels_first(self.augment.cut(self.normalise(moved), draws), channels_last=self.channels_last)
