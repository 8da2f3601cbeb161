"""Tar shards of small images in WebDataset's layout."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def jpeg(number: int, side: int = 12) -> bytes:
    """Return a JPEG of noise, another for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + number % 3, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def write(path: Path, members: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> Path:
    """Write a tar of `members` {name: bytes}, and its folder; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in dict(members).items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def shards(root: Path, *, train: int = 40, val: int = 8, classes: int = 4) -> Path:
    """Write shards of at most 16 samples each below `root`, and return it."""
    for split, count in (("train", train), ("val", val)):
        for shard in range(0, count, 16):
            members = {
                f"n{number:04}.{ending}": data
                for number in range(shard, min(shard + 16, count))
                for ending, data in (
                    ("jpg", jpeg(number + 1000 * (split == "val"))),
                    ("cls", b"%d" % (number % classes)),
                )
            }
            write(root / split / f"shard-{shard // 16:06}.tar", members)
    return root
