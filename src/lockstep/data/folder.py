"""Folders of photographs, decoded while training goes on.

With --augment crop, training images are cropped at random (8–100% of the area, sides 3:4 to 4:3) and resized, with
flip mirrored in half of the cases: together the "Inception" augmentation (Szegedy et al., 2015), by torchvision.
Held-out images, and training images without crop, are resized so that the shorter side is 256/224 of the asked one,
and their centre is taken. To the rest it is a data set of bytes like one of the user's own (see `users.py`).
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import RequestError
from ..files import read
from . import tree
from .alike import check_alike, digest
from .shared import Array, shared
from .source import Splits, Wish
from .users import Streamed, worker_count

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


@dataclass(frozen=True)
class Photographs:
    """A data set of the images at `paths` (N,) below `root`: (bytes (3, size, size), label)."""

    root: Path
    paths: Array
    labels: Array
    varied: Callable[[Image.Image], Image.Image]

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> Path:
        """Return the path of sample `index`."""
        return self.root / os.fsdecode(self.paths[index])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.varied(decode(self.path(index)))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), int(self.labels[index])


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


def transform(size: int, variations: Iterable[str]) -> Callable[[Image.Image], Image.Image]:
    """Return what makes an image size × size, varied by "crop" and "flip" where those are among the `variations`."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(size) if "crop" in variations else None
    centre = v2.Compose([_short_enough, v2.Resize(size * 256 // 224), v2.CenterCrop(size)])
    made: Callable[[Image.Image], Image.Image] = v2.Compose(
        [crop or centre, *([v2.RandomHorizontalFlip()] if "flip" in variations else [])]
    )
    return made


def _short_enough(image: Image.Image) -> Image.Image:
    """Return the image without the ends of one that is much longer than wide."""
    longest = _LONGEST * min(image.size)
    if max(image.size) <= longest:
        return image
    left, top = (max(0, (side - longest) // 2) for side in image.size)
    return image.crop((left, top, min(image.width, left + longest), min(image.height, top + longest)))


def build(wish: Wish) -> Splits:
    """Return the sources of the image folder at --data-dir (*collective*)."""
    config, size = wish.config, wish.config.image_size
    arrays = shared(wish.world, lambda: tree.scan(config))
    folders = tree.folders(config)
    check_alike(wish.world, f"The image folder {config.dir}", {"folders": " ".join(folders.values())})
    facts: dict[str, int | str] = {}
    skipped: dict[str, tuple[str, ...]] = {}
    for split in folders:
        paths, labels = arrays[f"{split} paths"], arrays[f"{split} labels"]
        facts |= {f"{split} images": len(paths), f"{split} names of digest": digest(paths, labels)}
    check_alike(wish.world, f"The image folder {config.dir}", facts)

    def photographs(split: str, variations: Iterable[str] = ()) -> Photographs:
        root = config.dir / folders[split]
        return Photographs(root, arrays[f"{split} paths"], arrays[f"{split} labels"], transform(size, variations))

    if config.skip_corrupt:
        for split in folders:
            whole = photographs(split)
            corrupt = _corrupt(wish, whole)
            skipped[split] = tuple(str(whole.path(index)) for index in corrupt)
            for name in (f"{split} paths", f"{split} labels"):
                arrays[name] = np.delete(arrays[name], corrupt)
            _check_classes(whole, arrays[f"{split} labels"])

    def source(split: str, variations: tuple[str, ...]) -> Streamed:
        return Streamed(
            wish,
            photographs(split, variations),
            split,
            classes=len(arrays["classes"]),
            # Crop and flip are done by the workers, before an image is small; cutout is left to the device.
            variations=tuple(name for name in variations if name == "cutout"),
            stays=split == "train" and variations == config.augment,
            like=torch.empty(3, size, size, dtype=torch.uint8),
            mean=MEAN,
            std=STD,
            skipped=skipped.get(split, ()),
        )

    names = tuple(map(os.fsdecode, arrays["classes"].tolist()))
    return Splits.of(wish, source, validation="validation" in folders, names=names)


def _check_classes(before: Photographs, labels: Array) -> None:
    """Raise `RequestError` where a class has no image left, as for one that has none to begin with."""
    for label in np.setdiff1d(before.labels, labels):
        first, *others = (before.path(index) for index in np.flatnonzero(before.labels == label).tolist())
        raise RequestError(
            f"--skip-corrupt leaves class folder {before.root / first.relative_to(before.root).parts[0]} without an "
            f"image: none of its {1 + len(others)} can be decoded, {first.name} for one; repair some, or remove the "
            "class from each split."
        )


def _corrupt(wish: Wish, images: Photographs) -> list[int]:
    """Return the samples that cannot be decoded; each rank tries its part of them (*collective*)."""

    def is_corrupt(index: int) -> bool:
        try:
            decode(images.path(index))
        except RequestError:
            return True
        return False

    mine = range(wish.world.rank, len(images), wish.world.size)
    # Threads are enough: Pillow decodes without the interpreter's lock.
    with ThreadPoolExecutor(max(1, worker_count(wish))) as threads:
        found = [index for index, bad in zip(mine, threads.map(is_corrupt, mine), strict=True) if bad]
    return sorted(itertools.chain.from_iterable(wish.world.gather(found)))
