"""Synthetic images, for measuring a model without any data set and for trying a set-up out.

They say nothing about how well a model learns. Sample i's label, and which of a few noise patterns it gets at what
strength, are hashes of i; its image is its class's pattern of coarse squares plus that noise. So the set has any
size at no cost in memory, is the same for every seed and on every machine, and is learnable.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

import numpy as np
import torch

from . import counter
from .augment import Augment, to_device
from .resident import channels_first
from .source import Fetched, Indices, Splits, Wish

CLASSES = 10
NOISES = 16
"""Noise patterns; with their strength there are as many different images as samples."""
SQUARES = 4
"""Squares a side of a class's pattern."""
_PURPOSE = 2


class Synthetic:
    """`samples` images (3, size, size) of mean 0; `split` keeps the held-out ones apart."""

    classes = CLASSES
    skipped: tuple[str, ...] = ()

    def __init__(self, wish: Wish, *, samples: int, split: int, variations: tuple[str, ...]) -> None:
        size = wish.config.image_size
        self.shape = (3, size, size)
        self.dtype = wish.dtype
        self._samples = samples
        self._split = split
        self._wish = wish
        self._augment = Augment(variations, wish.seed, size, size)
        square = np.arange(size) * SQUARES // size
        patterns = _noise(CLASSES, SQUARES, 0)[:, square][:, :, square]
        self._patterns = torch.from_numpy(patterns).to(wish.world.device, wish.dtype)
        self._noises = torch.from_numpy(_noise(NOISES, size, 1)).to(wish.world.device, wish.dtype)

    def __len__(self) -> int:
        return self._samples

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield x (n, 3, size, size) and y (n,) for each share."""
        hashes = counter.keys(3, _PURPOSE, self._split)
        keys = self._augment.keys(epoch)
        device, dtype = self._wish.world.device, self._wish.dtype
        for share in shares:
            random = counter.bits(hashes, share)
            labels = to_device(torch.from_numpy(counter.below(CLASSES, random[0])), device)
            noises = to_device(torch.from_numpy(counter.below(NOISES, random[1])), device)
            strengths = to_device(torch.from_numpy(0.5 + counter.uniform(random[2])).to(dtype), device)
            x = self._patterns.index_select(0, labels)
            x.addcmul_(self._noises.index_select(0, noises), strengths[:, None, None, None])
            draws = self._augment.draw(keys, share)
            x = self._augment.cut(self._augment.move(x, draws), draws)
            yield Fetched(channels_first(x, channels_last=self._wish.channels_last), labels, share)

    def close(self) -> None:
        """Nothing runs."""


def _noise(images: int, side: int, purpose: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return (images, side, side, 3) numbers of mean 0 and variance 1."""
    keys = counter.keys(1, _PURPOSE, 2, purpose)
    flat = counter.uniform(counter.bits(keys, np.arange(images * side * side * 3)))
    return ((flat - 0.5) * 12**0.5).reshape(images, side, side, 3)


def build(wish: Wish) -> Splits:
    """Return --samples training images, and a quarter as many held out."""
    samples = wish.config.samples

    def make(split: str, variations: tuple[str, ...]) -> Synthetic:
        count, number = (samples, 0) if split == "train" else (samples // 4, 1)
        return Synthetic(wish, samples=count, split=number, variations=variations)

    return Splits.of(wish, make)
