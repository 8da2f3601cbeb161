"""The files of an image folder, in ImageNet's layout: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg.

Where ROOT/test holds class folders too, it is the test set and val is for validation; images in ROOT/test that lie in
no class folder, such as ImageNet's, have no labels and are not read. ROOT/test may also take the place of val.

Classes are numbered in the order of their names, files within one likewise, so that every host that holds the same
files numbers them the same. A million paths as Python strings take 100 MB and are copied into each worker; here
they are two arrays, which all ranks of a host share.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config import DataConfig
from ..errors import RequestError
from .alike import digest
from .shared import Array, Arrays

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
_MOST_PATHS = 100
"""To one folder of images, by links: more of them are a trap."""


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


def folders(config: DataConfig) -> dict[str, str]:
    """Return {split: its folder} of an image folder."""
    val, test = config.dir / "val", config.dir / "test"
    if not (test.is_dir() and _classes(test)):
        return {"train": "train", "test": "val"}
    return {"train": "train"} | ({"validation": "val"} if val.is_dir() else {}) | {"test": "test"}


def check(config: DataConfig) -> None:
    """Raise `RequestError` where there is no image folder at --data-dir."""
    for folder in folders(config).values():
        if not (config.dir / folder).is_dir():
            raise RequestError(
                f"--data imagefolder needs {config.dir / folder}/CLASS/*.jpg, and {config.dir / folder} is not there; "
                "give --data-dir the folder that holds train and val, or train and test."
            )


def scan(config: DataConfig) -> Arrays:
    """Return the arrays of all splits' tables, and the classes' names.

    Raises `RequestError` for a missing folder, a class without images, or splits whose classes differ.
    """
    check(config)
    arrays: Arrays = {}
    classes: list[str] = []
    for split, folder in folders(config).items():
        root = config.dir / folder
        own = _classes(root)
        if not own:
            raise RequestError(f"{root} holds no class folders; the layout is {root}/CLASS/*.jpg.")
        listed = [_images(root, name) for name in own]
        for name, files in zip(own, listed, strict=True):
            if not files:
                raise RequestError(
                    f"Class folder {root / name} holds no images ({', '.join(ENDINGS[:3])}, …); "
                    "put some there, or remove the folder from each split."
                )
        classes = classes or own
        if different := sorted(set(classes) ^ set(own)):
            where = "train" if different[0] in classes else folder
            raise RequestError(
                f"The classes of train and {folder} in {config.dir} differ: {', '.join(different[:5])}"
                f"{' …' if len(different) > 5 else ''} ({len(different)} in all); {different[0]} is in {where} "
                "only. Give both the same folders of classes."
            )
        labels = [label for label, files in enumerate(listed) for _ in files]
        table = FileTable.of(root, (path for files in listed for path in files), labels)
        arrays |= {f"{split} names": table.names, f"{split} ends": table.ends, f"{split} labels": table.labels}
    arrays["classes"] = np.frombuffer(os.fsencode("/".join(classes)), np.uint8)
    return arrays


def tables(arrays: Arrays, config: DataConfig) -> dict[str, FileTable]:
    """Return the splits' tables from the arrays of `scan`."""
    return {
        split: FileTable(
            config.dir / folder, arrays[f"{split} names"], arrays[f"{split} ends"], arrays[f"{split} labels"]
        )
        for split, folder in folders(config).items()
    }


def class_names(arrays: Arrays) -> tuple[str, ...]:
    """Return the classes' names, in the order of their numbers, from the arrays of `scan`."""
    return tuple(os.fsdecode(arrays["classes"].tobytes()).split("/"))


def _classes(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir() if item.is_dir() and not _hidden(item.name))


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _images(root: Path, name: str) -> list[bytes]:
    """Return the paths of a class's images below `root`, sorted."""
    found: list[str] = []
    above: dict[str, frozenset[tuple[int, int]]] = {}  # the folders of each path: links may lead round in a circle
    visits: Counter[tuple[int, int]] = Counter()  # or from each folder to the next on two ways: 2 ** depth paths
    for folder, inner, files in os.walk(root / name, followlinks=True):
        about = Path(folder).stat()
        own, others = (about.st_dev, about.st_ino), above.get(str(Path(folder).parent), frozenset())
        known, above[folder] = own in others, others | {own}
        inner[:] = [] if known else sorted(each for each in inner if not _hidden(each))
        if known:
            continue
        visits[own] += 1
        if visits[own] > _MOST_PATHS:
            raise RequestError(
                f"Links in {root / name} lead to {folder} on more than {_MOST_PATHS} paths; remove some."
            )
        below = os.path.relpath(folder, root)
        found += [f"{below}/{file}" for file in files if file.lower().endswith(ENDINGS) and not _hidden(file)]
    return sorted(os.fsencode(path) for path in found)
