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
class Draws:
    """What was drawn for n samples; each attribute is (n,) int64."""

    table: Tensor
    """All of them, (5, n)."""

    def to(self, device: torch.device) -> Draws:
        """Return the draws on `device`."""
        return Draws(to_device(self.table, device))

    @property
    def row(self) -> Tensor:
        """First row of the crop, in pixels from the top of the unpadded image: -pad to pad; 0 without crop."""
        return self.table[0]

    @property
    def column(self) -> Tensor:
        """First column of the crop, likewise."""
        return self.table[1]

    @property
    def flip(self) -> Tensor:
        """1 where the crop is mirrored, else 0."""
        return self.table[2]

    @property
    def cut_row(self) -> Tensor:
        """Row of the pixel at the centre of the cut-out square."""
        return self.table[3]

    @property
    def cut_column(self) -> Tensor:
        """Column of that pixel."""
        return self.table[4]


@dataclass(frozen=True)
class Augment:
    """The variations `names` (of crop, flip, cutout) of images of `height` × `width` pixels, drawn from `seed`."""

    names: tuple[str, ...]
    seed: int
    height: int
    width: int

    def keys(self, epoch: int) -> counter.UInt64:
        """Return the keys that `draw` needs for the samples of one epoch."""
        return counter.keys(_DRAWS, self.seed, epoch)

    def draw(self, keys: counter.UInt64, indices: Indices) -> Draws:
        """Return what samples `indices` (n,) get in the epoch of `keys`, in host memory."""
        drawn = np.zeros((_DRAWS, len(indices)), np.int64)
        if not self.names:
            return Draws(torch.from_numpy(drawn))
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
        return Draws(torch.from_numpy(drawn))

    def __post_init__(self) -> None:
        for name, least in (("crop", 8), ("cutout", 2)):
            if name in self.names and min(self.height, self.width) < least:
                raise RequestError(
                    f"--augment {name} needs images of {least} × {least} pixels or more, and these have "
                    f"{self.height} × {self.width}; take {name} out; --augment with no words varies nothing."
                )

    @property
    def moves(self) -> bool:
        """Whether pixels move: crop or flip."""
        return "crop" in self.names or "flip" in self.names

    def apply(self, x: Tensor, draws: Draws) -> Tensor:
        """Return normalised images x (n, H, W, C) varied."""
        return self.cut(self.move(x, draws), draws)

    def move(self, x: Tensor, draws: Draws) -> Tensor:
        """Return images x (n, H, W, C) cropped and flipped."""
        if not self.moves:
            return x
        pixels = torch.cat([x.flatten(0, 2), x.new_zeros(1, x.shape[3])])
        return self.gather(pixels, torch.arange(len(x), device=x.device), draws)

    def gather(self, pixels: Tensor, images: Tensor, draws: Draws) -> Tensor:
        """Return crops and flips (n, H, W, C) of images number `images` (n,) in the table `pixels`.

        `pixels` is (images × H × W + 1, C); the last row is the pixel of the padding.
        """
        draws = draws.to(pixels.device)
        padding = len(pixels) - 1
        height, width = self.height, self.width
        across = torch.arange(width, device=pixels.device)
        columns = draws.column[:, None] + torch.where(draws.flip[:, None] == 1, width - 1 - across, across)
        rows = draws.row[:, None] + torch.arange(height, device=pixels.device)
        starts = (images[:, None] * height + rows) * width
        # Whatever lies outside gets an index beyond the table, which the clamp turns into the padding's.
        starts.masked_fill_((rows < 0) | (rows >= height), padding + width)
        columns.masked_fill_((columns < 0) | (columns >= width), padding + width)
        index = (starts[:, :, None] + columns[:, None, :]).clamp_(max=padding)
        return pixels.index_select(0, index.flatten()).view(len(images), height, width, pixels.shape[1])

    def cut(self, x: Tensor, draws: Draws) -> Tensor:
        """Return normalised images x (n, H, W, C), a square of each zeroed in place where cutout is asked for."""
        if "cutout" not in self.names:
            return x
        draws = draws.to(x.device)
        rows = _inside(draws.cut_row, self.height)
        # Whole rows of W × C values: a mask that is broadcast over the channels alone was twice as slow on a CPU.
        columns = _inside(draws.cut_column, self.width).repeat_interleave(x.shape[3], dim=1)
        x.view(len(x), self.height, self.width * x.shape[3]).masked_fill_(rows[:, :, None] & columns[:, None, :], 0)
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
