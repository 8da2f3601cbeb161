"""Folders of photographs, decoded while training goes on.

With --augment crop, training images are cropped at random (8–100% of the area, sides 3:4 to 4:3) and resized, with
flip mirrored in half of the cases: together the "Inception" augmentation (Szegedy et al., 2015), with torchvision's
RandomResizedCrop as the model for the details. What a sample gets is drawn by `counter` from (seed, epoch, sample
index). Held-out images, and training images without crop, are resized so that the shorter side is 256/224 of the
asked one, and their centre is taken. Workers decode and resize with Pillow, as torchvision's data sets do, and hand
on bytes; the device turns those into normalised numbers.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import RequestError
from ..files import read
from . import counter, tree
from .alike import check_alike
from .augment import Augment
from .loader import Streamed, worker_count
from .resident import Normalise, channels_first
from .shared import shared
from .source import Indices, Pair, Splits, Wish

MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
"""ImageNet's, as torchvision's pretrained models expect them, in units of bytes."""

_KINDS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")
"""What `tree.ENDINGS` stand for; Pillow knows forty more, of which some start other programs."""
_MOST_BYTES = 1 << 30
_SCAN = re.compile(rb"\xff\xda\0(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
_SCANS = 16
"""Of a progressive JPEG there are about ten, each a pass over all pixels, though it may be of 95 bytes."""
_MOST_PIXELS = 80_000_000
"""Below which Pillow does not warn. A file of 34 bytes can have as many."""
_LONGEST = 16
"""Times its shorter side that an image is long where only its centre is taken: more would be resized to be cut off."""
ATTEMPTS = 10
_DRAWS = 2 * ATTEMPTS + 3
_PURPOSE = 1
"""Keeps these draws apart from those of `augment`."""


@dataclass(frozen=True)
class Photographs:
    """Makes batches (n, size, size, 3) uint8 of the files in `table`, with `variations` (crop, flip) from `seed`."""

    table: tree.FileTable
    size: int
    seed: int
    variations: tuple[str, ...]

    def __call__(self, epoch: int, share: Indices) -> Pair:
        """Return x and y of a share. Raises `RequestError` for a file that cannot be decoded."""
        x = np.empty((len(share), self.size, self.size, 3), np.uint8)
        random = counter.bits(counter.keys(_DRAWS, self.seed, epoch, _PURPOSE), share)
        for place, index in enumerate(share):
            image = decode(self.table.path(index))
            x[place] = np.asarray(vary(image, self.size, self.variations, random[:, place]))
        return torch.from_numpy(x), torch.from_numpy(self.table.labels[share])


def decode(path: Path) -> Image.Image:
    """Return the image at `path` in red, green and blue.

    Raises `RequestError` where it cannot be decoded, or would cost far more than a photograph does.
    """
    try:
        data = read(path, most_bytes=_MOST_BYTES, through_links=True)
        with Image.open(io.BytesIO(data), formats=_KINDS) as image:
            scans = len(_SCAN.findall(data)) if image.format in ("JPEG", "MPO") else 1
            if image.width * image.height * max(1, scans / _SCANS) > _MOST_PIXELS:
                raise ValueError(f"{image.width} × {image.height} pixels in {scans} scans are too many")
            if image.tile and image.tile[0][0] == "bmp_rle":
                raise ValueError("it is a compressed BMP, which takes Pillow seconds")
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, …
        unknown = f"it is none of {', '.join(_KINDS)}" if isinstance(error, UnidentifiedImageError) else ""
        reason = unknown or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(
            f"{path} cannot be decoded ({reason}); repair or remove it, or leave such files out with --skip-corrupt."
        ) from error


def centre(image: Image.Image, size: int) -> Image.Image:
    """Return the central size × size pixels of `image` with its shorter side resized to 256/224 of `size`."""
    short = size * 256 // 224
    longest = _LONGEST * min(image.size)
    if max(image.size) > longest:
        left, top = (max(0, (side - longest) // 2) for side in image.size)
        image = image.crop((left, top, min(image.width, left + longest), min(image.height, top + longest)))
    width, height = image.size
    if width <= height:
        resized = image.resize((short, short * height // width), Image.Resampling.BILINEAR)
    else:
        resized = image.resize((short * width // height, short), Image.Resampling.BILINEAR)
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    return resized.crop((left, top, left + size, top + size))


def vary(image: Image.Image, size: int, variations: tuple[str, ...], random: counter.UInt64) -> Image.Image:
    """Return size × size pixels: with "crop" of a random part of `image`, with "flip" mirrored in half of the cases.

    `random` (23,) holds the bits that decide.
    """
    if "crop" in variations:
        box = crop_box(image.width, image.height, random)
        image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    else:
        image = centre(image, size)
    mirrored = "flip" in variations and counter.below(2, random[-1:])[0]
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image


def crop_box(width: int, height: int, random: counter.UInt64) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the part to take: torchvision's RandomResizedCrop.get_params.

    Of ten tries at an area and a ratio of the sides the first that fits is placed at random; if none does, the
    largest central part of an allowed ratio is taken.
    """
    least, most = 3 / 4, 4 / 3
    fractions = counter.uniform(random[: 2 * ATTEMPTS])
    for area_fraction, ratio_fraction in zip(fractions[::2], fractions[1::2], strict=True):
        area = width * height * (0.08 + (1 - 0.08) * area_fraction)
        ratio = math.exp(math.log(least) + (math.log(most) - math.log(least)) * ratio_fraction)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(counter.below(width - w + 1, random[-3:-2])[0])
            top = int(counter.below(height - h + 1, random[-2:-1])[0])
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < least:
        h = round(width / least)
    elif width / height > most:
        w = round(height * most)
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@dataclass(frozen=True)
class _Finish:
    """Turns bytes (n, H, W, 3) on the device into what the engine wants."""

    augment: Augment
    normalise: Normalise
    channels_last: bool

    def __call__(self, stored: Tensor, share: Indices, epoch: int) -> Tensor:
        draws = self.augment.draw(self.augment.keys(epoch), share)
        x = self.augment.cut(self.normalise(stored), draws)
        return channels_first(x, channels_last=self.channels_last)


def build(wish: Wish) -> Splits:
    """Return the sources of the image folder at --data-dir (*collective*)."""
    config, size = wish.config, wish.config.image_size
    arrays = shared(wish.world, lambda: tree.scan(config))
    tables = tree.tables(arrays, config)
    facts: dict[str, Any] = {"folders": " ".join(table.root.name for table in tables.values())}
    check_alike(wish.world, f"The image folder {config.dir}", facts)
    facts = {f"{split} {what}": fact for split, table in tables.items() for what, fact in table.facts().items()}
    check_alike(wish.world, f"The image folder {config.dir}", facts)
    skipped: dict[str, tuple[str, ...]] = dict.fromkeys(tables, ())
    if config.skip_corrupt:
        for split, files in tables.items():
            corrupt = _corrupt(wish, files)
            skipped[split] = tuple(str(files.path(index)) for index in corrupt)
            tables[split] = files.without(corrupt) if corrupt else files
            _check_classes(files, tables[split], split)
    names = tree.class_names(arrays)
    normalise = Normalise(MEAN, STD, pixels=size * size, dtype=wish.dtype, device=wish.world.device)

    def source(split: str, variations: tuple[str, ...]) -> Streamed:
        # Crop and flip are done by the workers, before an image is small; cutout is left to the device.
        cutout = tuple(name for name in variations if name == "cutout")
        return Streamed(
            Photographs(tables[split], size, wish.seed, variations),
            _Finish(Augment(cutout, wish.seed, size, size), normalise, wish.channels_last),
            samples=len(tables[split]),
            classes=len(names),
            shape=(3, size, size),
            dtype=wish.dtype,
            workers=worker_count(wish),
            stay=split == "train" and variations == config.augment,
            device=wish.world.device,
            skipped=skipped[split],
        )

    return Splits.of(wish, source, validation="validation" in tables, names=names)


def _check_classes(before: tree.FileTable, after: tree.FileTable, split: str) -> None:
    """Raise `RequestError` where a class has no image left, as for one that has none to begin with."""
    for label in np.setdiff1d(before.labels, after.labels):
        first, *others = (before.path(index) for index in np.flatnonzero(before.labels == label).tolist())
        raise RequestError(
            f"--skip-corrupt leaves class folder {before.root / first.relative_to(before.root).parts[0]} without an "
            f"image: none of its {1 + len(others)} can be decoded, {first.name} for one; repair some, or remove the "
            "class from each split."
        )


def _corrupt(wish: Wish, table: tree.FileTable) -> list[int]:
    """Return the samples that cannot be decoded; each rank tries its part of them (*collective*)."""

    def is_corrupt(index: int) -> bool:
        try:
            decode(table.path(index))
        except RequestError:
            return True
        return False

    mine = range(wish.world.rank, len(table), wish.world.size)
    # Threads are enough: Pillow decodes without the interpreter's lock.
    with ThreadPoolExecutor(max(1, worker_count(wish))) as threads:
        found = [index for index, bad in zip(mine, threads.map(is_corrupt, mine), strict=True) if bad]
    return sorted(itertools.chain.from_iterable(wish.world.gather(found)))
