"""Augmentation and normalisation of whole batches, on any device.

The usual three variations of small images: a crop of the image padded by an eighth of its side with black (4 pixels of
32), a horizontal flip in half of the cases, and cutout (DeVries & Taylor, 2017), which zeroes a square of half the side
around a random pixel, clipped at the border, after normalisation. `counter` draws a sample's variation from (seed,
epoch, sample index).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import RequestError
from . import counter
from .source import Indices, Request
from .transfer import to_device

Floats = tuple[float, ...]
_DRAWS = 5


class Plain:
    """Unchanged samples (n, …), moved to the run's device and precision."""

    def __init__(self, request: Request, like: Tensor) -> None:
        self.shape, self.dtype = tuple(like.shape), request.dtype if like.is_floating_point() else like.dtype
        # Of one channel, both orders are the same memory.
        is_last = request.channels_last and like.dim() == 3 and len(like) > 1
        self._device, self._memory_format = request.world.device, torch.channels_last if is_last else None

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        x = to_device(x, self._device)
        if self._memory_format is None and x.dtype == self.dtype:
            return x
        return x.to(self.dtype, memory_format=self._memory_format or torch.preserve_format)

    def draw(self, epoch: int, indices: Indices) -> Tensor:
        """Return (0, n): nothing is drawn."""
        return torch.empty((0, len(indices)), dtype=torch.int64)


class Transform:
    """Augmentation and normalisation of stored images, on the device.

    Turns (n, H, W, C), or (n, C, H, W) with `turns`, into (n, C, H, W); `shape` is (C, H, W). `names` are variations
    (of crop, flip, cutout); `mean` and `std`, if given, normalise: a number per channel in units of the stored values.
    """

    def __init__(
        self,
        request: Request,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        mean: Floats = (),
        std: Floats = (),
        *,
        turns: bool = False,
    ) -> None:
        if further := [name for name in names if name not in ("crop", "flip", "cutout")]:
            raise RequestError(f"--augment {further[0]} belongs to --data imagefolder and webdataset; leave it out.")
        for name, least in (("crop", 8), ("cutout", 2)):  # smaller ones would not change
            if name in names and min(shape[1:]) < least:
                sides = f"{shape[1]} × {shape[2]}; leave {name} out"
                raise RequestError(f"--augment {name} needs images of {least} × {least} pixels or more, found {sides}.")
        self.shape, self.dtype = shape, request.dtype
        self._names, self._seed, self._turns, self._is_normalised = names, request.seed, turns, bool(mean)
        self._device, self._channels_last = request.world.device, request.channels_last
        # Half precision is rounded once, at the end.
        self._exact = self.dtype if self.dtype in (torch.float32, torch.float64) else torch.float32
        # Repeated for a whole image: broadcasting over the channels alone was 6 times as slow on a CPU.
        means, stds = (torch.tensor(values, dtype=torch.float64).repeat(shape[1] * shape[2]) for values in (mean, std))
        self._scale, self._shift = (values.to(self._device, self._exact) for values in (1 / stds, -means / stds))

    def __call__(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return images x, varied by `draws`, which are on the device (see `draw`)."""
        x = to_device(x, self._device)
        x = x.permute(0, 2, 3, 1).contiguous() if self._turns else x
        if "crop" in self._names or "flip" in self._names:
            x = _move(x, draws[:3])
        x = self.normalised(x)
        if "cutout" in self._names:
            _cut(x, draws[3:])
        x = x.permute(0, 3, 1, 2)
        return x if self._channels_last else x.contiguous()

    def normalised(self, x: Tensor) -> Tensor:
        """Return images x (n, H, W, C) on the run's device, normalised if the run requests it."""
        x = to_device(x, self._device)
        if not self._is_normalised:
            return x
        flat = x.flatten(1).to(self._exact).mul_(self._scale).add_(self._shift)
        return flat.view(x.shape).to(self.dtype)

    def draw(self, epoch: int, indices: Indices) -> Tensor:
        """Return the draws for samples `indices` (n,) in an epoch.

        (5, n) int64 in host memory: first row and column of the crop, in pixels from the corner of the unpadded image
        (-pad to pad), 1 where it is mirrored, and row and column of the pixel at the centre of the cut-out square.
        (0, n) without variations.
        """
        draws = np.zeros((_DRAWS if self._names else 0, len(indices)), np.int64)
        _, *sides = self.shape
        bounds = {"crop": [(row, side // 8 * 2 + 1) for row, side in enumerate(sides)], "flip": [(2, 2)]}
        bounds["cutout"] = list(enumerate(sides, start=3))
        if self._names:
            random = counter.bits(counter.keys(_DRAWS, self._seed, epoch), indices)
            for row, bound in (pair for name in self._names for pair in bounds[name]):
                draws[row] = counter.below(bound, random[row]) - (bound // 2 if row < 2 else 0)
        return torch.from_numpy(draws)


def _move(x: Tensor, draws: Tensor) -> Tensor:
    """Crop and flip images x (n, H, W, C) in one gather of pixels; `draws` are (3, n)."""
    row, column, flip = draws[..., None]
    images, height, width, _ = x.shape
    pad_y, pad_x = height // 8, width // 8
    padded = nn.functional.pad(x, (0, 0, pad_x, pad_x, pad_y, pad_y))
    across = torch.arange(width, device=x.device)
    columns = pad_x + column + torch.where(flip == 1, width - 1 - across, across)
    rows = pad_y + row + torch.arange(height, device=x.device)
    rows += torch.arange(images, device=x.device)[:, None] * padded.shape[1]
    index = rows[:, :, None] * padded.shape[2] + columns[:, None, :]
    return padded.flatten(0, 2).index_select(0, index.flatten()).view(x.shape)


def _cut(x: Tensor, draws: Tensor) -> None:
    """Zero a square in each image x (n, H, W, C), centred at the pixels `draws` (2, n)."""
    # Whole rows of W × C values: a mask that is broadcast over the channels alone was twice as slow on a CPU.
    images, height, width, channels = x.shape
    columns = _inside(draws[1], width).repeat_interleave(channels, dim=1)
    x.view(images, height, width * channels).masked_fill_(
        _inside(draws[0], height)[:, :, None] & columns[:, None, :], 0
    )


def _inside(centre: Tensor, side: int) -> Tensor:
    """Return a mask (n, side) of the window of side // 2 around each centre (n,)."""
    offset = torch.arange(side, device=centre.device) - centre[:, None] + side // 4
    return (offset >= 0) & (offset < side // 2)
