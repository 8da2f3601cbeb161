"""Variations of training images, for a whole batch at once and on whatever device it lies.

The usual three of small images: a crop of the image padded by an eighth of its side with black (4 pixels of 32),
a horizontal flip in half of the cases, and cutout (DeVries & Taylor, 2017), which zeroes a square of half the side
around a random pixel, clipped at the border, after normalisation. Which ones a sample gets is drawn by `counter`
from (seed, epoch, sample index). Crop and flip only say where each output pixel comes from: both are one gather.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError
from . import counter
from .source import Indices

_DRAWS = 5


@dataclass(frozen=True)
class Augment:
    """The variations `names` (of crop, flip, cutout) of images of `height` × `width` pixels, drawn from `seed`.

    Draws are (5, n) int64: first row and column of the crop, in pixels from the corner of the unpadded image (-pad to
    pad), 1 where it is mirrored, and row and column of the pixel at the centre of the cut-out square.
    """

    names: tuple[str, ...]
    seed: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name, least in (("crop", 8), ("cutout", 2)):
            if name in self.names and min(self.height, self.width) < least:
                raise RequestError(
                    f"--augment {name} needs images of {least} × {least} pixels or more, and these have "
                    f"{self.height} × {self.width}; take {name} out; --augment with no words varies nothing."
                )

    def keys(self, epoch: int) -> counter.UInt64:
        """Return the keys that `draw` needs for the samples of one epoch."""
        return counter.keys(_DRAWS, self.seed, epoch)

    def draw(self, keys: counter.UInt64, indices: Indices) -> Tensor:
        """Return the draws (5, n) of samples `indices` (n,) in the epoch of `keys`, in host memory."""
        drawn = np.zeros((_DRAWS, len(indices)), np.int64)
        if self.names:
            random = counter.bits(keys, indices)
            if "crop" in self.names:
                for row, side in enumerate((self.height, self.width)):
                    pad = side // 8
                    drawn[row] = counter.below(2 * pad + 1, random[row]) - pad
            if "flip" in self.names:
                drawn[2] = counter.below(2, random[2])
            if "cutout" in self.names:
                drawn[3] = counter.below(self.height, random[3])
                drawn[4] = counter.below(self.width, random[4])
        return torch.from_numpy(drawn)

    @property
    def moves(self) -> bool:
        """Whether pixels move: crop or flip."""
        return "crop" in self.names or "flip" in self.names

    def move(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return images x (n, H, W, C) cropped and flipped."""
        if not self.moves:
            return x
        pixels = torch.cat([x.flatten(0, 2), x.new_zeros(1, x.shape[3])])
        return self.gather(pixels, torch.arange(len(x), device=x.device), draws)

    def gather(self, pixels: Tensor, images: Tensor, draws: Tensor) -> Tensor:
        """Return crops and flips (n, H, W, C) of images number `images` (n,) in the table `pixels`.

        `pixels` is (images × H × W + 1, C); the last row is the pixel of the padding.
        """
        row, column, flip, _, _ = to_device(draws, pixels.device)[..., None]
        padding = len(pixels) - 1
        height, width = self.height, self.width
        across = torch.arange(width, device=pixels.device)
        columns = column + torch.where(flip == 1, width - 1 - across, across)
        rows = row + torch.arange(height, device=pixels.device)
        starts = (images[:, None] * height + rows) * width
        # Whatever lies outside gets an index beyond the table, which the clamp turns into the padding's.
        starts.masked_fill_((rows < 0) | (rows >= height), padding + width)
        columns.masked_fill_((columns < 0) | (columns >= width), padding + width)
        index = (starts[:, :, None] + columns[:, None, :]).clamp_(max=padding)
        return pixels.index_select(0, index.flatten()).view(len(images), height, width, pixels.shape[1])

    def cut(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return normalised images x (n, H, W, C), a square of each zeroed in place where cutout is asked for."""
        if "cutout" not in self.names:
            return x
        row, column = to_device(draws[3:], x.device)
        # Whole rows of W × C values: a mask that is broadcast over the channels alone was twice as slow on a CPU.
        columns = _inside(column, self.width).repeat_interleave(x.shape[3], dim=1)
        within = _inside(row, self.height)[:, :, None] & columns[:, None, :]
        x.view(len(x), self.height, self.width * x.shape[3]).masked_fill_(within, 0)
        return x


def _inside(centre: Tensor, side: int) -> Tensor:
    """Return (n, side) bool: the positions within the window of side // 2 around each of centre (n,)."""
    offset = torch.arange(side, device=centre.device) - centre[:, None] + side // 4
    return (offset >= 0) & (offset < side // 2)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, without making the host wait for the GPU."""
    if tensor.device.type == device.type:
        return tensor
    # A copy from pageable memory may wait for all work queued on the GPU; one from pinned memory never does.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
