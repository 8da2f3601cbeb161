"""The files of an image folder, in ImageNet's layout: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg.

Where ROOT/test holds class folders too, it is the test set and val is for validation; images in ROOT/test that lie in
no class folder, such as ImageNet's, have no labels and are not read. ROOT/test may also take the place of val.

Classes are numbered in the order of their names, files within one likewise, so that every host that holds the same
files numbers them the same. A million paths as Python strings take 100 MB and are copied into each worker; here
they are two arrays, which all ranks of a host share.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..config.schema import DataConfig
from ..errors import RequestError
from .shared import Arrays

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")


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
    """Return the paths of each split's images, below its folder, and their labels; and the classes' names.

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
        arrays[f"{split} paths"] = np.array([path for files in listed for path in files], np.bytes_)
        arrays[f"{split} labels"] = np.repeat(np.arange(len(own)), [len(files) for files in listed])
    return arrays | {"classes": np.array([os.fsencode(name) for name in classes], np.bytes_)}


def _classes(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))


def _images(root: Path, name: str) -> list[bytes]:
    """Return the paths of a class's images below `root`, sorted; a folder that links lead to again is read once."""
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for folder, inner, files in os.walk(root / name, followlinks=True):
        about = Path(folder).stat()
        if (about.st_dev, about.st_ino) in seen:
            inner.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        inner[:] = sorted(each for each in inner if not each.startswith("."))
        below = os.path.relpath(folder, root)
        found += [f"{below}/{file}" for file in files if file.lower().endswith(ENDINGS) and not file.startswith(".")]
    return sorted(os.fsencode(path) for path in found)
