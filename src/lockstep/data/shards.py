"""Tar shards of images in WebDataset's layout: ROOT/train/*.tar and ROOT/val/*.tar (A. Aizman et al., 2019).

A sample is two members of a shard: KEY.jpg and KEY.cls, its label in digits. A key ends at the first dot of a member's
file name. The shards' headers are read once; an image is then read by its place in its shard, in any order. Nothing is
unpacked: members' names name no files, and links are refused.
"""

from __future__ import annotations

import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import hardware
from ..config.schema import DataConfig
from ..errors import RequestError
from ..files import DEFECTS, open_regular, reason
from .folder import ENDINGS, MOST_BYTES, Photographs, columns, folders, shards

if TYPE_CHECKING:
    from .ranks import Arrays

_END = bytes(1024)
"""Two blocks of zeros end a tar."""
_MOST_DIGITS = 9
_Sample = tuple[str, int, int, int]
"""Member's name; offset and size of the image; label."""


def scan(config: DataConfig) -> Arrays:
    """Return the columns that `folder.build` takes; the classes have no names.

    Raises `RequestError` for a damaged shard, an image without a label, and a label beyond those of train.
    """
    arrays: Arrays = {name: np.array([], np.bytes_) for name in ("classes", "ignored")}
    for split, folder in folders(config).items():
        root, files = config.dir / folder, shards(config.dir / folder)
        with ThreadPoolExecutor(hardware.cpus()) as threads:
            tables = zip(files, threads.map(_read, files), strict=True)
            samples = [(f"{shard.name}/{name}", *numbers) for shard, table in tables for name, *numbers in table]
        names, *rest = zip(*samples, strict=True) if samples else ((), (), (), ())
        offsets, sizes, labels = (np.array(column, np.int64) for column in rest)
        paths = np.array([*map(os.fsencode, names)], np.bytes_)
        images = Photographs(root, paths, labels, np.stack([offsets, sizes], axis=1))
        arrays |= columns(config, split, images)
        labels, classes = arrays[f"{split} labels"], arrays["train labels"].max(initial=-1) + 1
        if not len(labels):
            raise RequestError(
                f"{root} holds no images that can be decoded; the layout is {root}/*.tar, with members KEY.jpg and "
                "KEY.cls."
            )
        if labels.max() >= classes:
            raise RequestError(
                f"{root} has label {labels.max()}, and train has labels 0 to {classes - 1}; give both the same classes."
            )
    return arrays


def _read(shard: Path) -> list[_Sample]:
    """Return a shard's samples in the order of their images."""
    images, labels = dict[str, tuple[str, int, int]](), dict[str, int]()
    try:
        with open(shard, "rb", opener=open_regular) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise ValueError(f"{member.name} is a link or special file")
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                key = f"{folder}/{stem}"
                if ending == "cls":
                    digits = os.pread(file.fileno(), min(member.size, _MOST_DIGITS + 2), member.offset_data).strip()
                    if not (digits.isdigit() and len(digits) <= _MOST_DIGITS):
                        raise ValueError(f"{member.name} holds no class number")
                    labels[key] = int(digits)
                elif f".{ending.lower()}" in ENDINGS:
                    if key in images or member.size > MOST_BYTES:
                        raise ValueError(f"{member.name} is a second image of its key, or too large")
                    images[key] = member.name, member.offset_data, member.size
            # tarfile takes a cut at a member's end, and a damaged header, for the end.
            if os.pread(file.fileno(), len(_END), archive.offset) != _END:
                raise ValueError("it is cut short or damaged")
        if single := sorted(images.keys() ^ labels.keys()):
            raise ValueError(f"{single[0].lstrip('/')} has no .{'cls' if single[0] in images else 'jpg'}")
    except (tarfile.TarError, *DEFECTS) as error:
        text = str(error) if isinstance(error, ValueError | tarfile.TarError) else reason(error)
        raise RequestError(f"{shard} cannot be read ({text}); write it again, or remove it.") from error
    return [(*image, labels[key]) for key, image in images.items()]
