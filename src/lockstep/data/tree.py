"""The files of an image folder, in ImageNet's layout: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg.

Classes are numbered in the order of their names, files within one likewise, so that every host that holds the same
files numbers them the same. A million paths as Python strings take 100 MB and are copied into each worker; here
they are two arrays, which all ranks of a host share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import DataConfig
from ..errors import RequestError
from .alike import digest
from .shared import Array, Arrays

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
SPLITS = {"train": "train", "test": "val"}
"""{split: its folder}"""


@dataclass(frozen=True)
class FileTable:
    """The files of one split: `names` is their paths below `root`, end to end, `ends` (N,) where each ends."""

    root: Path
    names: Array
    ends: Array
    labels: Array

    @classmethod
    def of(cls, root: Path, paths: Iterable[bytes], labels: Iterable[int]) -> FileTable:
        """Return the table of `paths` below `root` with their labels."""
        listed = list(paths)
        ends = np.cumsum([len(path) for path in listed], dtype=np.int64)
        return cls(root, np.frombuffer(b"".join(listed), np.uint8), ends, np.array(list(labels), np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, index: int) -> Path:
        """Return the path of sample `index`."""
        return self.root / os.fsdecode(self._name(index))

    def _name(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].tobytes()

    def without(self, excluded: Iterable[int]) -> FileTable:
        """Return the table without the samples `excluded`; those after them are renumbered."""
        gone = set(excluded)
        kept = [index for index in range(len(self)) if index not in gone]
        return FileTable.of(self.root, (self._name(index) for index in kept), self.labels[kept])

    def facts(self) -> dict[str, int | str]:
        """Return what has to be the same on every host: the number of images, and a hash of their names and labels."""
        return {"images": len(self), "names of digest": digest(self.names, self.ends, self.labels)}


def check(config: DataConfig) -> None:
    """Raise `RequestError` where there is no image folder at --data-dir."""
    for folder in SPLITS.values():
        if not (config.dir / folder).is_dir():
            raise RequestError(
                f"--data imagefolder needs {config.dir / folder}/CLASS/*.jpg, and {config.dir / folder} is not there; "
                "give --data-dir the folder that holds train and val."
            )


def scan(config: DataConfig) -> Arrays:
    """Return the arrays of both splits' tables, and the classes' names.

    Raises `RequestError` for a missing folder, a class without images, or splits whose classes differ.
    """
    check(config)
    arrays: Arrays = {}
    classes: dict[str, list[str]] = {}
    for split, folder in SPLITS.items():
        root = config.dir / folder
        classes[split] = sorted(item.name for item in root.iterdir() if item.is_dir() and not _hidden(item.name))
        if not classes[split]:
            raise RequestError(f"{root} holds no class folders; the layout is {root}/CLASS/*.jpg.")
        listed = [_images(root, name) for name in classes[split]]
        for name, files in zip(classes[split], listed, strict=True):
            if not files:
                raise RequestError(
                    f"Class folder {root / name} holds no images ({', '.join(ENDINGS[:3])}, …); "
                    "put some there, or remove the folder, for val and train alike."
                )
        labels = [label for label, files in enumerate(listed) for _ in files]
        table = FileTable.of(root, (path for files in listed for path in files), labels)
        arrays |= {f"{split} names": table.names, f"{split} ends": table.ends, f"{split} labels": table.labels}
    if different := sorted(set(classes["train"]) ^ set(classes["test"])):
        where = "train" if different[0] in classes["train"] else "val"
        raise RequestError(
            f"The classes of train and val in {config.dir} differ: {', '.join(different[:5])}"
            f"{' …' if len(different) > 5 else ''} ({len(different)} in all); {different[0]} is in {where} "
            "only. Give both the same folders of classes."
        )
    arrays["classes"] = np.array(len(classes["train"]))
    return arrays


def table(arrays: Arrays, config: DataConfig, split: str) -> FileTable:
    """Return a split's table from the arrays of `scan`."""
    root = config.dir / SPLITS[split]
    return FileTable(root, arrays[f"{split} names"], arrays[f"{split} ends"], arrays[f"{split} labels"])


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _images(root: Path, name: str) -> list[bytes]:
    """Return the paths of a class's images below `root`, sorted."""
    found = []
    for folder, inner, files in os.walk(root / name, followlinks=True):
        inner[:] = [each for each in inner if not _hidden(each)]
        below = os.path.relpath(folder, root)
        found += [f"{below}/{file}" for file in files if file.lower().endswith(ENDINGS) and not _hidden(file)]
    return sorted(os.fsencode(path) for path in found)
