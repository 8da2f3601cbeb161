"""Data sets without workers: held in memory, or computed. One copy per host, or on the GPU; small ones per rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from . import counter, order
from .images import Floats, Plain, Transform
from .ranks import Array, Arrays, shared
from .source import Fetched, Indices, Request, Source, Splits
from .transfer import to_device

Read = Callable[[], dict[str, tuple[Array, Array]]]
"""Returns {"train" and "test": (images (N, H, W, C) uint8, labels (N,))}."""
Number = Callable[[Indices], Tensor]
"""indices (n,) -> numbers (k, n), int64, by which the device finds or computes the samples."""
Fetch = Callable[[Indices, Tensor], tuple[Tensor, Tensor]]
"""(indices (n,), their numbers (k, n) on the device) -> the stored samples (n, …), and their labels on the device."""
_CLASSES, _NOISES, _SQUARES = 10, 16, 4
"""Of `fake`: classes, noise patterns, and squares per side of a class's pattern."""
_FAKE = 2
_SHARES = 1024
_READY_BYTES = 64 << 20
"""Largest data set without augmentation to normalise once. Per batch, it takes 7 µs of a small net's step."""


class Data(Source):
    """Source of `samples` samples, read by `number` and `fetch` and transformed by `transform`."""

    def __init__(
        self,
        samples: int,
        classes: int,
        transform: Transform | Plain,
        number: Number,
        fetch: Fetch,
        device: torch.device,
    ) -> None:
        self.classes, self.shape, self.dtype = classes, transform.shape, transform.dtype
        self._samples, self._transform, self._number, self._fetch = samples, transform, number, fetch
        self._device = device

    def __len__(self) -> int:
        return self._samples

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for chunk in _chunks(shares):
            indices = np.concatenate(chunk)
            rows = [self._number(indices), self._transform.draw(epoch, indices)]
            # One copy to the device, for thousands of samples.
            parts = to_device(torch.cat(rows), self._device).split_with_sizes([*map(len, rows)])
            sizes = [*map(len, chunk)]
            for share, numbers, draws in zip(chunk, *(part.split_with_sizes(sizes, 1) for part in parts), strict=True):
                x, y = self._fetch(share, numbers)
                yield Fetched(self._transform(x, draws), y, share)


def _chunks(shares: Iterable[Indices]) -> Iterator[list[Indices]]:
    """Yield successive shares, at most `_SHARES`, of about `order.CHUNK` samples together."""
    chunk, samples = list[Indices](), 0
    for share in shares:
        chunk.append(share)
        samples += len(share)
        if samples >= order.CHUNK or len(chunk) == _SHARES:
            yield chunk
            chunk, samples = [], 0
    if chunk:
        yield chunk


def build(request: Request, read: Read, classes: int, mean: Floats, std: Floats) -> Splits:
    """Return the sources of small images (*collective*). One rank of each host calls `read`.

    `mean` and `std` are per channel, over the training images, in units of the stored bytes.
    """

    def tables() -> Arrays:
        return {f"{split} {column}": array for split, pair in read().items() for column, array in enumerate(pair)}

    arrays = shared(request.world, tables)

    def make(split: str, variations: tuple[str, ...]) -> Source:
        x, y = (torch.from_numpy(arrays[f"{split} {column}"]) for column in range(2))
        shape = (x.shape[3], x.shape[1], x.shape[2])
        transform = Transform(request, shape, variations, mean, std)
        if not variations and x.numel() * request.dtype.itemsize <= _READY_BYTES and request.config.on_device != "off":
            x, transform = transform.normalised(x), Transform(request, shape, ())
        return resident(request, x, y, classes, transform)

    return Splits.of(request, make, labels=arrays["train 1"])


def resident(request: Request, x: Tensor, y: Tensor, classes: int, transform: Transform | Plain) -> Data:
    """Return a source of samples x (N, …) and labels y (N,).

    x is moved to an accelerator on request, or if it takes at most a quarter of the free memory; else it stays in host
    memory.
    """
    mode, device = request.config.on_device, request.world.device
    y = y.to(device, torch.int64)
    if device.type != "cpu" and mode != "off":
        x = x.to(device) if mode == "on" or x.nbytes * 4 <= torch.accelerator.get_memory_info(device)[0] else x

    is_resident = x.device == y.device

    def number(indices: Indices) -> Tensor:
        return torch.from_numpy(indices)[None]

    def fetch(indices: Indices, numbers: Tensor) -> tuple[Tensor, Tensor]:
        rows = numbers.squeeze(0)
        return x.index_select(0, rows if is_resident else torch.from_numpy(indices)), y.index_select(0, rows)

    return Data(len(y), classes, transform, number, fetch, device)


def fake(request: Request) -> Splits:
    """Return synthetic images (3, size, size) for measurements.

    --samples for training, a quarter as many for testing. Label, noise pattern and noise strength are hashes of a
    sample's index; an image is its class's pattern of coarse squares plus noise. The images take no memory, and a model
    can learn them.
    """
    size, samples, device = request.config.image_size, request.config.samples, request.world.device
    square = np.arange(size) * _SQUARES // size
    patterns, noises = (
        torch.from_numpy(table).to(device, request.dtype)
        for table in (_noise(_CLASSES, _SQUARES, 0)[:, square][:, :, square], _noise(_NOISES, size, 1))
    )

    def make(split: str, variations: tuple[str, ...]) -> Source:
        is_train = split == "train"
        keys = counter.keys(3, _FAKE, 0 if is_train else 1)

        def number(indices: Indices) -> Tensor:
            label, noise, strength = counter.bits(keys, indices)
            rows = counter.below(_CLASSES, label), counter.below(_NOISES, noise), counter.numerators(strength)
            return torch.from_numpy(np.stack(rows))

        def fetch(indices: Indices, numbers: Tensor) -> tuple[Tensor, Tensor]:
            y, noise, strength = numbers[:3]
            scale = (0.5 + strength.double() * counter.UNIT).to(request.dtype)[:, None, None, None]
            return patterns.index_select(0, y).addcmul_(noises.index_select(0, noise), scale), y

        transform = Transform(request, (3, size, size), variations)
        return Data(samples if is_train else samples // 4, _CLASSES, transform, number, fetch, device)

    return Splits.of(request, make)


def _noise(images: int, side: int, purpose: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return noise (images, side, side, 3) of mean 0 and variance 1."""
    keys = counter.keys(1, _FAKE, 2, purpose)
    flat = counter.uniform(counter.bits(keys, np.arange(images * side * side * 3)))
    return ((flat - 0.5) * 12**0.5).reshape(images, side, side, 3)
