"""Data sets without workers: held in memory, or computed. One copy per host, or on the GPU; small ones per rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import numpy as np
import torch
from torch import Tensor

from . import counter
from .images import Floats, Plain, Transform, to_device
from .ranks import Array, Arrays, shared
from .source import Fetched, Indices, Request, Source, Splits

Read = Callable[[], dict[str, tuple[Array, Array]]]
"""Returns {"train" and "test": (images (N, H, W, C) uint8, labels (N,))}."""
Fetch = Callable[[Indices], tuple[Tensor, Tensor]]
"""indices (n,) -> the stored samples (n, …), and their labels on the device."""
_CLASSES, _NOISES, _SQUARES = 10, 16, 4
"""Of `fake`: classes, noise patterns, and squares per side of a class's pattern."""
_FAKE = 2
_READY_BYTES = 64 << 20
"""Largest data set without augmentation to normalise once. Per batch, it takes 7 µs of a small net's step."""


class Data(Source):
    """Source of `samples` samples, read by `fetch` and transformed by `transform`."""

    def __init__(self, samples: int, classes: int, transform: Transform | Plain, fetch: Fetch) -> None:
        self.classes, self.shape, self.dtype = classes, transform.shape, transform.dtype
        self._samples, self._transform, self._fetch = samples, transform, fetch

    def __len__(self) -> int:
        return self._samples

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        for share in shares:
            x, y = self._fetch(share)
            yield Fetched(self._transform(x, share, epoch), y, share)


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

    def fetch(share: Indices) -> tuple[Tensor, Tensor]:
        host_indices = torch.from_numpy(share)
        device_indices = to_device(host_indices, y.device)
        return x.index_select(0, device_indices if x.device == y.device else host_indices), y.index_select(
            0, device_indices
        )

    return Data(len(y), classes, transform, fetch)


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

        def fetch(share: Indices) -> tuple[Tensor, Tensor]:
            random = counter.bits(keys, share)
            y = to_device(torch.from_numpy(counter.below(_CLASSES, random[0])), device)
            noise = to_device(torch.from_numpy(counter.below(_NOISES, random[1])), device)
            strength = to_device(torch.from_numpy(0.5 + counter.uniform(random[2])).to(request.dtype), device)
            x = patterns.index_select(0, y)
            return x.addcmul_(noises.index_select(0, noise), strength[:, None, None, None]), y

        transform = Transform(request, (3, size, size), variations)
        return Data(samples if is_train else samples // 4, _CLASSES, transform, fetch)

    return Splits.of(request, make)


def _noise(images: int, side: int, purpose: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return noise (images, side, side, 3) of mean 0 and variance 1."""
    keys = counter.keys(1, _FAKE, 2, purpose)
    flat = counter.uniform(counter.bits(keys, np.arange(images * side * side * 3)))
    return ((flat - 0.5) * 12**0.5).reshape(images, side, side, 3)
