"""Folders of photographs, ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, decoded during training.

If ROOT/test also holds class folders, test is the test set and val is for validation; val may then be absent.
Crop and flip are the "Inception" augmentation (Szegedy et al., 2015), by torchvision; other images are resized so that
the shorter side is 256/224 of the requested one, and cropped to the centre. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import hardware
from ..config.schema import DataConfig
from ..errors import RequestError
from ..files import read

if TYPE_CHECKING:
    from PIL import Image

    from .ranks import Array, Arrays
    from .source import Request, Source, Splits

MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
"""ImageNet's, as torchvision's pretrained models expect them, in units of bytes."""
_KINDS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
"""Accepted formats. Pillow knows forty more, some of which start other programs."""
_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".jpe", ".jfif", ".mpo", ".apng", ".webp", ".bmp", ".dib", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tif", ".tiff"),
)
"""Pillow's for these formats."""
_MOST_BYTES = 1 << 30
_SCAN = re.compile(rb"\xff\xda\0(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
_SCANS = 16
"""A progressive JPEG has about ten, each a pass over all pixels; its file may have 95 bytes."""
_MOST_PIXELS = 80_000_000
"""Pillow does not warn below this. A file of 34 bytes can have as many pixels."""


@dataclass(frozen=True)
class Photographs:
    """Map-style data set of images: (bytes (size, size, 3), label). `paths` (N,) are bytes, to save memory."""

    root: Path
    paths: Array
    labels: Array
    transform: Callable[[Image.Image], Image.Image]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        image = decode(self.root / os.fsdecode(self.paths[index]))
        return np.array(self.transform(image)), int(self.labels[index])


def decode(path: Path) -> Image.Image:
    """Return the image at `path` in red, green and blue.

    Raises `RequestError` for a file that cannot be decoded, or would cost far more than a photograph.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        data = read(path, most_bytes=_MOST_BYTES, through_links=True)
        with Image.open(io.BytesIO(data), formats=_KINDS) as image:
            scans = len(_SCAN.findall(data)) if image.format in ("JPEG", "MPO") else 1
            if image.width * image.height * max(1, scans / _SCANS) > _MOST_PIXELS:
                raise ValueError(f"{image.width} × {image.height} pixels in {scans} scans are too many")
            if image.tile and image.tile[0][0] == "bmp_rle":
                raise ValueError("it is a compressed BMP, which takes Pillow seconds")
            if image.mode == "F" or image.mode.startswith("I"):  # which Pillow would clip at 255
                raise ValueError(f"its pixels have mode {image.mode}; save it with 8 bits for each channel")
            return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, …
        unknown = f"it is none of {', '.join(_KINDS)}" if isinstance(error, UnidentifiedImageError) else ""
        reason = unknown or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(
            f"{path} cannot be decoded ({reason}); repair or remove it, or leave such files out with --skip-corrupt."
        ) from error


def transform(size: int, variations: tuple[str, ...] = ()) -> Callable[[Image.Image], Image.Image]:
    """Return a transform to size × size images, with "crop" and "flip" if the `variations` name them."""
    centre = partial(_centre, size=size)
    if not {"crop", "flip"} & {*variations}:
        return centre  # without torchvision, which some builds of torch cannot load
    from torchvision.transforms import v2

    composed: Callable[[Image.Image], Image.Image] = v2.Compose(
        [v2.RandomResizedCrop(size) if "crop" in variations else centre]
        + [v2.RandomHorizontalFlip()] * ("flip" in variations)
    )
    return composed


def _centre(image: Image.Image, size: int) -> Image.Image:
    """Resize to a shorter side of 256/224 of `size`; crop the centre.

    As torchvision's `Resize` and `CenterCrop`, within one of 255 levels. Computes the centre alone: of a long strip,
    nearly all would be cut off.
    """
    from PIL.Image import Resampling

    columns, rows = (_middle(side, size * 256 // 224 * side // min(image.size), size) for side in image.size)
    return image.resize((size, size), Resampling.BILINEAR, box=(columns[0], rows[0], columns[1], rows[1]))


def _middle(side: int, resized: int, size: int) -> tuple[float, float]:
    """Return the ends, in pixels of `side`, of the middle `size` pixels after resizing to `resized`."""
    start = round((resized - size) / 2)
    return side * start / resized, side * (start + size) / resized


def folders(config: DataConfig) -> dict[str, str]:
    """Return {split: its folder}. A test folder without class folders, as ImageNet's is, is not read.

    Raises `RequestError` without an image folder at --data-dir.
    """
    val, test = config.dir / "val", config.dir / "test"
    folder_of = {"train": "train", "test": "val"}
    if test.is_dir() and _classes(test):
        folder_of = {"train": "train"} | ({"validation": "val"} if val.is_dir() else {}) | {"test": "test"}
    for root in (config.dir / name for name in folder_of.values()):
        if not root.is_dir():
            advice = "give --data-dir the folder that holds train and val, or train and test"
            raise RequestError(f"--data imagefolder needs {root}/CLASS/*.jpg, and {root} is not there; {advice}.")
    return folder_of


def _classes(root: Path) -> list[str]:
    """Return the classes, in ImageFolder's order."""
    return sorted(item.name for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))


def _scan(config: DataConfig) -> Arrays:
    """Return each split's image paths, labels and skipped files; class names; numbers of other files by ending."""
    arrays: Arrays = {}
    other_files = Counter[str]()
    folder_of, classes = folders(config), _classes(config.dir / "train")
    for name in folder_of.values():
        if different := sorted({*classes} ^ {*_classes(config.dir / name)}):
            some = f"{', '.join(different[:5])} ({len(different)} in all)"
            raise RequestError(f"The classes of train and {name} in {config.dir} differ: {some}; give both the same.")
    for split, folder in folder_of.items():
        root = config.dir / folder
        files = [_images(root, name, other_files) for name in classes]
        if config.skip_corrupt:
            every = [root / path for paths in files for path in paths]
            with ThreadPoolExecutor(hardware.cpus()) as threads:  # Pillow decodes without the interpreter's lock
                corrupt = {path: "" for path, bad in zip(every, threads.map(_is_corrupt, every), strict=True) if bad}
            files = [[path for path in paths if root / path not in corrupt] for paths in files]
            arrays[f"{split} skipped"] = np.array([os.fsencode(path) for path in corrupt], np.bytes_)
        if not (classes and all(files)):
            empty = root / classes[files.index([])] if classes else root
            raise RequestError(
                f"{empty} holds no images ({', '.join(_ENDINGS[:3])}, …) that can be decoded; the layout is "
                f"{root}/CLASS/*.jpg: put some there, or remove the class from each split."
            )
        arrays[f"{split} paths"] = np.array([os.fsencode(path) for paths in files for path in paths], np.bytes_)
        arrays[f"{split} labels"] = np.repeat(np.arange(len(classes)), [len(paths) for paths in files])
    ignored = [f"{ending or 'no ending'} {count:,}" for ending, count in sorted(other_files.items())]
    texts = {"classes": classes, "ignored": ignored}
    return arrays | {key: np.array([os.fsencode(word) for word in words], np.bytes_) for key, words in texts.items()}


def _images(root: Path, name: str, other_files: Counter[str]) -> list[str]:
    """Return the paths, below `root`, of a class's images, in ImageFolder's order.

    Links are followed, but each folder is read once: links may form a circle, or lead to one folder on many paths.
    Counts files of other endings in `other_files`.
    """
    images: list[tuple[str, str]] = []
    start = os.path.realpath(root / name)
    read_folders = {str(parent) for parent in Path(start).parents}
    for folder, inner, files in os.walk(root / name, followlinks=True):
        if (real := os.path.realpath(folder)) in read_folders:
            inner.clear()
            continue
        read_folders.add(real)
        inner[:] = sorted(subfolder for subfolder in inner if not subfolder.startswith("."))
        below = os.path.relpath(folder, root)
        for file in files:
            if file.lower().endswith(_ENDINGS) and not file.startswith("."):
                images.append((below, file))
            elif not file.startswith("."):
                other_files[Path(file).suffix.lower()] += 1
    return [f"{below}/{file}" for below, file in sorted(images)]


def _is_corrupt(path: Path) -> bool:
    try:
        decode(path)
    except RequestError:
        return True
    return False


def build(request: Request) -> Splits:
    """Return the sources of the image folder at --data-dir (*collective*)."""
    from .images import Transform
    from .ranks import check_alike, digest, shared
    from .source import SPLITS, Splits
    from .users import Streamed

    config, size, none = request.config, request.config.image_size, np.empty(0)
    arrays = shared(request.world, lambda: _scan(config))
    facts: dict[str, int | str] = {}
    for split in SPLITS:
        paths, labels = (arrays.get(f"{split} {name}", none) for name in ("paths", "labels"))
        facts |= {f"{split} images": len(paths), f"{split} names of digest": digest(paths, labels)}
    check_alike(request.world, f"The image folder {config.dir}", facts)
    splits, names = folders(config), tuple(map(os.fsdecode, arrays["classes"].tolist()))

    def make(split: str, variations: tuple[str, ...]) -> Source:
        paths, labels = arrays[f"{split} paths"], arrays[f"{split} labels"]
        images = Photographs(config.dir / splits[split], paths, labels, transform(size, variations))
        # Workers crop and flip the large image; the device does the cutout.
        cutout = tuple(name for name in variations if name == "cutout")
        source = Streamed(request, images, split, len(names), Transform(request, (3, size, size), cutout, MEAN, STD))
        source.files = splits[split], paths
        source.skipped = tuple(map(os.fsdecode, arrays.get(f"{split} skipped", none).tolist()))
        return source

    has_validation, labels = "validation" in splits, arrays["train labels"]
    sources = Splits.of(request, make, validation=has_validation, names=names, labels=labels)
    if ignored := list(map(os.fsdecode, arrays["ignored"].tolist())):
        endings = ", ".join(ignored[:5]) + ", …" * (len(ignored) > 5)
        text = f"not read in {config.dir}, since their endings are not those of images: {endings}"
        sources = dataclasses.replace(sources, cautions=(*sources.cautions, text))
    return sources
