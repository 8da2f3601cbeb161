"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

They come as pickles. torchvision loads those whose checksum is the official files'.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..config.schema import DataConfig
from ..errors import RequestError

if TYPE_CHECKING:
    from .ranks import Array


class Cifar(NamedTuple):
    """Description of one of the two data sets. `mean` and `std` are over all training pixels, in stored bytes."""

    name: str
    classes: int
    folder: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = Cifar("cifar10", 10, "cifar-10-batches-py", (125.307, 122.950, 113.865), (62.993, 62.089, 66.705))
CIFAR100 = Cifar("cifar100", 100, "cifar-100-python", (129.31, 124.06, 112.43), (68.16, 65.38, 70.43))


def check(kind: Cifar, config: DataConfig) -> None:
    """Raise `RequestError` for an absent set without --download. Imports no torch."""
    folder = config.dir / kind.folder
    if not folder.is_dir() and not config.download:
        raise RequestError(
            f"--data {kind.name} needs {folder}, which does not exist; "
            f"give --data-dir the folder that holds {kind.folder}, or allow --download."
        )


def read(kind: Cifar, config: DataConfig) -> dict[str, tuple[Array, Array]]:
    """Return {split: (images, labels)} for train and test, downloaded if need be.

    Images are (N, 32, 32, 3) uint8, labels (N,) uint8. Raises `RequestError` for missing or unofficial files.
    """
    check(kind, config)
    folder = config.dir / kind.folder
    try:
        from torchvision import datasets

        reader = getattr(datasets, kind.name.upper())
        if not folder.is_dir():
            _download(reader, folder)
        loaded = {split: reader(config.dir, train=split == "train") for split in ("train", "test")}
    except ImportError as error:
        raise RequestError(f"--data {kind.name} needs torchvision, which cannot be imported here ({error}).") from error
    except (OSError, RuntimeError) as error:  # torchvision names no file
        raise RequestError(
            f"{folder} does not have the official files ({error}); remove it and allow --download, or unpack the "
            "official archive there."
        ) from error
    return {
        split: (np.ascontiguousarray(part.data), np.array(part.targets, np.uint8)) for split, part in loaded.items()
    }


def _download(reader: Any, folder: Path) -> None:
    """Download the set's folder atomically. Interrupted downloads and concurrent nodes leave no partial folder."""
    from torchvision.datasets.utils import download_and_extract_archive

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as fresh:
            download_and_extract_archive(reader.url, fresh, md5=reader.tgz_md5)
            with contextlib.suppress(OSError):  # another node on the same file system may have been faster
                (Path(fresh) / folder.name).rename(folder)
    except (OSError, RuntimeError) as error:  # no network, no room; another checksum
        raise RequestError(
            f"{reader.url} cannot be downloaded into {folder.parent} ({error}); fetch it by hand and unpack it there."
        ) from error
