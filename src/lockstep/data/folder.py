"""Photographs decoded during training: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, or tar shards (`shards`).

If ROOT/test also holds class folders, test is the test set and val is for validation; val may then be absent.
Crop and flip are the "Inception" augmentation (Szegedy et al., 2015), by torchvision; other images are resized so that
the shorter side is 256/224 of the requested one, and cropped to the centre. Pillow reads the header, torchvision
decodes JPEGs (the same pixels, faster), and torch resizes bytes. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import hardware
from ..config.schema import DataConfig
from ..errors import RequestError
from ..files import read, read_span

if TYPE_CHECKING:
    from torch import Tensor

    from .ranks import Array, Arrays
    from .source import Request, Source, Splits

MEAN = (0.485 * 255, 0.456 * 255, 0.406 * 255)
STD = (0.229 * 255, 0.224 * 255, 0.225 * 255)
"""ImageNet's, as torchvision's pretrained models expect them, in units of bytes."""
_KINDS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
"""Accepted formats. Pillow knows forty more, some of which start other programs."""
ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".jpe", ".jfif", ".mpo", ".apng", ".webp", ".bmp", ".dib", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tif", ".tiff"),
)
"""Pillow's for these formats."""
MOST_BYTES = 1 << 30
_SCAN = re.compile(rb"\xff\xda\0(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
_SCANS = 16
"""A progressive JPEG has about ten, each a pass over all pixels; its file may have 95 bytes."""
_MOST_PIXELS = 80_000_000
"""Pillow does not warn below this. A file of 34 bytes can have as many pixels."""


_LEAST_CROP = 0.244
"""Shorter side of RandomResizedCrop's smallest crop, in shorter sides of the image: (0.08 · 3/4) ** 0.5, rounded."""
_GAP = 2
"""Least factor of resizing after a JPEG was decoded at a part of its size, as in Pillow's `Image.thumbnail`."""
_LONGEST = 4
"""Sides of more than so many shorter ones are cut to it before resizing: most of a strip's pixels are cropped away."""
LAYOUTS = {"imagefolder": "CLASS/*.jpg", "webdataset": "*.tar"}
"""Of a split's folder, by data set."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Images as a model expects them: normalised by `mean` and `std`, in units of bytes, after they are resized.

    The centre that an evaluation takes is the share `crop` of an image's shorter side.
    """

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    interpolation: str = "bilinear"
    crop: float = 224 / 256
    size: int | None = None
    """Side in pixels of the images that the model's weights were trained on."""

    def describe(self, size: int) -> list[str]:
        """Return lines on images of `size` pixels that differ from torchvision's; none for those."""
        if self.size is None:
            return []
        mean, std = (", ".join(f"{value / 255:.3g}" for value in values) for values in (self.mean, self.std))
        line = f"images as the model's weights expect them: mean {mean}, std {std}, {self.interpolation}"
        made_for = f"; they were trained at --image-size {self.size}" if size != self.size else ""
        return [f"{line}, centre of {self.crop:g} of the shorter side{made_for}"]


@dataclass(frozen=True)
class Photographs:
    """Map-style data set of images: (bytes (size, size, 3), label). `paths` (N,) are bytes, to save memory.

    With `spans` (N, 2), image `SHARD/MEMBER` is `size` bytes at `offset` of the tar shard. `least` is that of `decode`.
    """

    root: Path
    paths: Array
    labels: Array
    spans: Array | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    least: int = 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = os.fsdecode(self.paths[index])
        span = None
        if self.spans is not None:
            offset, size = self.spans[index].tolist()
            span = self.root / path.partition("/")[0], offset, size
        image = decode(self.root / path, self.least, span)
        image = self.transform(image) if self.transform else image
        return image.permute(1, 2, 0), int(self.labels[index])

    def is_corrupt(self, index: int) -> bool:
        """Return whether the image cannot be decoded."""
        try:
            self[index]
        except RequestError:
            return True
        return False


def decode(path: Path, least: int = 0, span: tuple[Path, int, int] | None = None) -> Tensor:
    """Return the image at `path`, or at `span` (file, offset, size), as bytes (3, H, W) in red, green and blue.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size (libjpeg's DCT scaling) if each side then has `least` pixels; at
    full size if `least` is 0. Raises `RequestError` for a file that cannot be decoded, or would cost far more than a
    photograph.
    """
    import torch
    from PIL import Image, UnidentifiedImageError

    try:
        data = read_span(*span) if span else read(path, most_bytes=MOST_BYTES, through_links=True)
        with Image.open(io.BytesIO(data), formats=_KINDS) as image:
            scans = len(_SCAN.findall(data)) if image.format in ("JPEG", "MPO") else 1
            if image.width * image.height * max(1, scans / _SCANS) > _MOST_PIXELS:
                raise ValueError(f"{image.width} × {image.height} pixels in {scans} scans are too many")
            if image.tile and image.tile[0][0] == "bmp_rle":
                raise ValueError("it is a compressed BMP, which takes Pillow seconds")
            if image.mode == "F" or image.mode.startswith("I"):  # which Pillow would clip at 255
                raise ValueError(f"its pixels have mode {image.mode}; save it with 8 bits for each channel")
            size = image.size
            if least:
                image.draft("RGB", (least, least))
            jpeg = _jpeg()
            if jpeg and image.format == "JPEG" and image.mode in ("RGB", "L") and image.size == size:
                # Pillow names the damage; a deprecation is an error under -W error.
                with contextlib.suppress(RuntimeError, AttributeError, DeprecationWarning):
                    return jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
            return torch.from_numpy(pixels).permute(2, 0, 1)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, …
        unknown = f"it is none of {', '.join(_KINDS)}" if isinstance(error, UnidentifiedImageError) else ""
        reason = unknown or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(
            f"{path} cannot be decoded ({reason}); repair or remove it, or leave such files out with --skip-corrupt."
        ) from error


@cache
def _jpeg() -> Callable[[Tensor], Tensor] | None:
    """Return torchvision's decoder of JPEGs, whose pixels are Pillow's, in less time; None where it does not load.

    torchvision 0.29 deprecates it in favour of TorchCodec.
    """
    with contextlib.suppress(ImportError, RuntimeError):
        from torchvision.io import ImageReadMode, decode_jpeg

        return partial(decode_jpeg, mode=ImageReadMode.RGB)
    return None


def transform(
    size: int, variations: tuple[str, ...] = (), look: Look | None = None
) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return a transform to images (3, size, size), and the shortest side that it needs (`decode`'s `least`).

    "crop" and "flip" are torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`, with the same draws; then follow
    its `RandAugment`, and `RandomErasing` by the mean colour, with their defaults.
    """
    look, crop = look or Look(), None
    if "crop" in variations:
        from torchvision.transforms import RandomResizedCrop  # which some builds of torch cannot load

        crop = partial(RandomResizedCrop.get_params, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3])
    further: list[Callable[[Tensor], Tensor]] = []
    if "randaugment" in variations or "random-erasing" in variations:
        from torchvision.transforms import v2

        erasing = v2.RandomErasing(value=[round(value) for value in look.mean])
        kinds = {"randaugment": v2.RandAugment(), "random-erasing": erasing}
        further = [kinds[name] for name in kinds if name in variations]
    least = size / _LEAST_CROP if crop else size / look.crop
    vary = partial(_vary, size=size, crop=crop, flips="flip" in variations, look=look, further=further)
    return vary, round(_GAP * least)


def _vary(
    image: Tensor,
    size: int,
    crop: Callable[[Tensor], tuple[int, int, int, int]] | None,
    *,
    flips: bool,
    look: Look,
    further: Sequence[Callable[[Tensor], Tensor]],
) -> Tensor:
    import torch

    if crop:
        top, left, height, width = crop(image)
        image = _resize(image[:, top : top + height, left : left + width], size, size, look.interpolation)
    else:
        image = _centre(image, size, look)
    image = image.flip(2) if flips and torch.rand(1) < 0.5 else image
    for vary in further:
        image = vary(image)
    return image


def _centre(image: Tensor, size: int, look: Look) -> Tensor:
    """Resize to a shorter side of `size` / `look.crop`; crop the centre, as torchvision's `Resize` and `CenterCrop`."""
    shorter = min(image.shape[1:])
    for dim in (1, 2):
        if (excess := image.shape[dim] - _LONGEST * shorter) > 0:
            image = image.narrow(dim, excess // 2, _LONGEST * shorter)
    height, width = (int(size / look.crop) * side // shorter for side in image.shape[1:])
    top, left = (round((side - size) / 2) for side in (height, width))
    return _resize(image, height, width, look.interpolation)[:, top : top + size, left : left + size]


def _resize(image: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Return bytes (3, height, width) whose pixels are contiguous."""
    import torch
    from torch.nn import functional

    image = image[None].contiguous(memory_format=torch.channels_last)
    # torch takes the strides of a single image for those of planes, and would copy each plane.
    image = image.as_strided(image.shape, (image.numel(), *image.stride()[1:]))
    return functional.interpolate(image, (height, width), mode=mode, antialias=True)[0]


def folders(config: DataConfig) -> dict[str, str]:
    """Return {split: its folder}. A test folder without class folders or shards, as ImageNet's is, is not read.

    Raises `RequestError` if --data-dir has no such folders.
    """
    val, test, layout = config.dir / "val", config.dir / "test", LAYOUTS[config.name]
    folder_of = {"train": "train", "test": "val"}
    if test.is_dir() and (shards(test) if layout == "*.tar" else _classes(test)):
        folder_of = {"train": "train"} | ({"validation": "val"} if val.is_dir() else {}) | {"test": "test"}
    for root in (config.dir / name for name in folder_of.values()):
        if not root.is_dir():
            advice = "give --data-dir the folder that holds train and val, or train and test"
            raise RequestError(f"--data {config.name} needs {root}/{layout}, and {root} is not there; {advice}.")
    return folder_of


def shards(root: Path) -> list[Path]:
    """Return the tar shards in a split's folder, by name."""
    return sorted(path for path in root.glob("*.tar") if not path.name.startswith("."))


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
        paths = np.array([os.fsencode(path) for paths in files for path in paths], np.bytes_)
        labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in files])
        arrays |= columns(config, split, Photographs(root, paths, labels))
        counts = np.bincount(arrays[f"{split} labels"], minlength=len(classes))
        if not (classes and counts.all()):
            empty = root / classes[int(counts.argmin())] if classes else root
            raise RequestError(
                f"{empty} holds no images ({', '.join(ENDINGS[:3])}, …) that can be decoded; the layout is "
                f"{root}/CLASS/*.jpg: put some there, or remove the class from each split."
            )
    ignored = [f"{ending or 'no ending'} {count:,}" for ending, count in sorted(other_files.items())]
    texts = {"classes": classes, "ignored": ignored}
    return arrays | {key: np.array([os.fsencode(word) for word in words], np.bytes_) for key, words in texts.items()}


def columns(config: DataConfig, split: str, images: Photographs) -> Arrays:
    """Return the columns of a split's table; with --skip-corrupt, those of images that can be decoded."""
    table = {"paths": images.paths, "labels": images.labels}
    if images.spans is not None:
        table["spans"] = images.spans
    if config.skip_corrupt:
        with ThreadPoolExecutor(hardware.cpus()) as threads:  # images are decoded without the interpreter's lock
            is_corrupt = np.array([*threads.map(images.is_corrupt, range(len(images)))], bool)
        skipped = [os.fsencode(images.root) + b"/" + path for path in images.paths[is_corrupt].tolist()]
        table = {name: column[~is_corrupt] for name, column in table.items()} | {
            "skipped": np.array(skipped, np.bytes_)
        }
    return {f"{split} {name}": column for name, column in table.items()}


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
            if file.lower().endswith(ENDINGS) and not file.startswith("."):
                images.append((below, file))
            elif not file.startswith("."):
                other_files[Path(file).suffix.lower()] += 1
    return [f"{below}/{file}" for below, file in sorted(images)]


def build(request: Request, scan: Callable[[DataConfig], Arrays] = _scan) -> Splits:
    """Return the sources of the images at --data-dir, which `scan` lists (*collective*)."""
    from .images import Transform
    from .ranks import check_alike, digest, shared
    from .source import SPLITS, Splits
    from .users import Streamed

    config, size, look, none = request.config, request.config.image_size, request.look or Look(), np.empty(0)
    arrays = shared(request.world, lambda: scan(config))
    facts: dict[str, int | str] = {}
    for split in SPLITS:
        table = [arrays.get(f"{split} {name}", none) for name in ("paths", "labels", "spans")]
        facts |= {f"{split} images": len(table[0]), f"{split} names of digest": digest(*table)}
    check_alike(request.world, f"The image folder {config.dir}", facts)
    splits, names = folders(config), tuple(map(os.fsdecode, arrays["classes"].tolist()))
    classes = int(arrays["train labels"].max()) + 1
    _jpeg()  # imported once, and not by each worker

    def make(split: str, variations: tuple[str, ...]) -> Source:
        paths, labels = arrays[f"{split} paths"], arrays[f"{split} labels"]
        steps = transform(size, variations, look)
        images = Photographs(config.dir / splits[split], paths, labels, arrays.get(f"{split} spans"), *steps)
        # Workers crop and flip the large image; the device does the cutout.
        cutout = tuple(name for name in variations if name == "cutout")
        finish = Transform(request, (3, size, size), cutout, look.mean, look.std)
        source = Streamed(request, images, split, classes, finish)
        source.files = splits[split], paths
        source.skipped = tuple(map(os.fsdecode, arrays.get(f"{split} skipped", none).tolist()))
        return source

    has_validation, labels = "validation" in splits, arrays["train labels"]
    sources = Splits.of(request, make, validation=has_validation, names=names, labels=labels)
    sources = dataclasses.replace(sources, cautions=(*sources.cautions, *look.describe(size)))
    if ignored := list(map(os.fsdecode, arrays["ignored"].tolist())):
        endings = ", ".join(ignored[:5]) + ", …" * (len(ignored) > 5)
        text = f"not read in {config.dir}, since their endings are not those of images: {endings}"
        sources = dataclasses.replace(sources, cautions=(*sources.cautions, text))
    return sources
