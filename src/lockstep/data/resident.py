"""Data sets that fit in memory: kept there whole, and fetched by index.

Images are kept as the bytes that they are in the file, (N, H, W, C), one copy a host (see `shared.py`) or on the
GPU. A batch is one gather of pixels, which also does crop and flip, then one conversion to the asked dtype with
normalisation; channels_last memory then costs nothing, since that is how the bytes lie. A set whose normalised
form is small, and that is not augmented, is normalised once: a step then pays for two `index_select`s.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError
from .augment import Augment, to_device
from .shared import Array, Arrays, shared
from .source import Fetched, Indices, Source, Splits, Wish

READY_BYTES = 64 * 2**20
"""Largest normalised set that is kept instead of the bytes it came from."""

Read = Callable[[], dict[str, tuple[Array, Array]]]
"""Returns {"train" and "test": (images (N, H, W, C) uint8, labels (N,))}."""


def build(wish: Wish, read: Read, *, classes: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Splits:
    """Return the sources of small images that `read` reads, on one rank of each host (*collective*).

    `mean` and `std` are those of each channel over the training images, in the units of the stored bytes.
    """

    def tables() -> Arrays:
        arrays: Arrays = {}
        for split, (images, labels) in read().items():
            pixels = images.reshape(-1, images.shape[-1])
            arrays["sides"] = np.array(images.shape[1:3])
            arrays[f"{split} pixels"] = np.concatenate([pixels, np.zeros_like(pixels[:1])])
            arrays[f"{split} labels"] = labels.astype(np.int64)
        return arrays

    arrays = {name: torch.from_numpy(array) for name, array in shared(wish.world, tables).items()}
    height, width = arrays["sides"].tolist()
    device = wish.world.device

    def make(split: str, variations: tuple[str, ...]) -> Source:
        pixels, labels = arrays[f"{split} pixels"], arrays[f"{split} labels"].to(device)
        ready_bytes = pixels.numel() * wish.dtype.itemsize
        if not variations and ready_bytes <= READY_BYTES:
            home = device if belongs_on_device(wish, ready_bytes) else pixels.device
            images = pixels[:-1].view(-1, height, width, pixels.shape[1]).to(home)
            normalise = Normalise(mean, std, pixels=height * width, dtype=wish.dtype, device=home)
            ready = channels_first(normalise(images), channels_last=wish.channels_last)
            return ResidentTensors(ready, labels, classes=classes, channels_last=wish.channels_last)
        return ResidentImages(
            pixels.to(device) if belongs_on_device(wish, pixels.nbytes) else pixels,
            labels,
            classes=classes,
            augment=Augment(variations, wish.seed, height, width),
            normalise=Normalise(mean, std, pixels=height * width, dtype=wish.dtype, device=device),
            channels_last=wish.channels_last,
        )

    return Splits.of(wish, make)


def belongs_on_device(wish: Wish, size_bytes: int) -> bool:
    """Return whether the set goes to the accelerator's memory: asked for, or less than a quarter of what is free."""
    mode, device = wish.config.on_device, wish.world.device
    if mode == "off" or device.type != "cuda":
        return False
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if mode == "on" and size_bytes > free_bytes:
        raise RequestError(
            f"--on-device on: the data set needs {size_bytes / 1e6:,.0f} MB, but {device} has "
            f"{free_bytes / 1e6:,.0f} MB free; use --on-device auto."
        )
    return mode == "on" or size_bytes * 4 <= free_bytes


class Normalise:
    """Per channel, x becomes (x - mean) ÷ std, in `dtype`; mean and std are in the units of the stored values."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], *, pixels: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        # Half precision is rounded once, at the end.
        self._exact = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        # Repeated for a whole image: broadcasting over the channels alone was 6 times as slow on a CPU.
        self._scale = (1 / stds).repeat(pixels).to(device, self._exact)
        self._shift = (-means / stds).repeat(pixels).to(device, self._exact)

    def __call__(self, x: Tensor) -> Tensor:
        """Return images x (n, H, W, C) normalised."""
        flat = x.flatten(1).to(self._exact).mul_(self._scale).add_(self._shift)
        return flat.view(x.shape).to(self.dtype)


def channels_first(x: Tensor, *, channels_last: bool) -> Tensor:
    """Return images x (n, H, W, C) as (n, C, H, W), in channels_last or plain memory."""
    view = x.permute(0, 3, 1, 2)
    return view if channels_last else view.contiguous()


class ResidentTensors:
    """Samples (N, *shape) that need nothing done to them, in host memory or on the device.

    `labels` (N,) int64 lies on the device.
    """

    skipped: tuple[str, ...] = ()

    def __init__(self, samples: Tensor, labels: Tensor, *, classes: int, channels_last: bool = False) -> None:
        self.classes = classes
        self.shape = tuple(samples.shape[1:])
        self.dtype = samples.dtype
        # In channels_last memory the samples are kept as (N, H, W, C), since index_select returns plain memory.
        self._turned = channels_last and samples.dim() == 4
        self._samples = samples.permute(0, 2, 3, 1).contiguous() if self._turned else samples.contiguous()
        self._labels = labels

    def __len__(self) -> int:
        return len(self._labels)

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield x (n, *shape) and y (n,) for each share."""
        device = self._labels.device
        for share in shares:
            index = to_device(torch.from_numpy(share), device)
            at = index if self._samples.device == device else torch.from_numpy(share)
            yield Fetched(self._fetch(share, at, epoch), self._labels.index_select(0, index), share)

    def _fetch(self, share: Indices, at: Tensor, epoch: int) -> Tensor:
        """Return x of a share; `at` is the share beside the samples."""
        x = to_device(self._samples.index_select(0, at), self._labels.device)
        return x.permute(0, 3, 1, 2) if self._turned else x

    def close(self) -> None:
        """Nothing runs."""


class ResidentImages(ResidentTensors):
    """Images of bytes, augmented and normalised batch by batch.

    `pixels` (N × H × W + 1, C) uint8 holds the images and last the pixel of the padding, in host memory or on the
    device; `labels` (N,) int64 lies on the device.
    """

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        *,
        classes: int,
        augment: Augment,
        normalise: Normalise,
        channels_last: bool,
    ) -> None:
        super().__init__(pixels[:-1].view(-1, augment.height, augment.width, pixels.shape[1]), labels, classes=classes)
        self.shape = (pixels.shape[1], augment.height, augment.width)
        self.dtype = normalise.dtype
        self._pixels, self._augment, self._normalise = pixels, augment, normalise
        self._channels_last = channels_last

    def _fetch(self, share: Indices, at: Tensor, epoch: int) -> Tensor:
        draws = self._augment.draw(self._augment.keys(epoch), share)
        if self._augment.moves:
            stored = self._augment.gather(self._pixels, at, draws)
        else:
            stored = self._samples.index_select(0, at)
        x = self._augment.cut(self._normalise(to_device(stored, self._labels.device)), draws)
        return channels_first(x, channels_last=self._channels_last)
