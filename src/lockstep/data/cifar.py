"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

They come as pickles, which could run any program when they are loaded. Here their opcodes are read as a list, in which
the pixels are one long string and the labels are the integers behind their key. Only a download needs torchvision,
which some builds of torch cannot load.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickletools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..config.schema import DataConfig
from ..errors import RequestError
from ..files import read as read_file

if TYPE_CHECKING:
    from .ranks import Array

_PIXELS = 3 * 32 * 32
_MOST_BYTES = 1 << 28  # of a file: the largest official one has 155 MB


class Cifar(NamedTuple):
    """Description of one of the two data sets.

    `mean` and `std` are over all training pixels, in units of the stored bytes. `train` and `test` are {file: md5}.
    """

    name: str
    classes: int
    folder: str
    url: str
    archive_md5: str
    train: Mapping[str, str]
    test: Mapping[str, str]
    label_key: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    folder="cifar-10-batches-py",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    archive_md5="c58f30108f718f92721af3b95e74349a",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    label_key="labels",
    mean=(125.307, 122.950, 113.865),
    std=(62.993, 62.089, 66.705),
)
CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    folder="cifar-100-python",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    label_key="fine_labels",
    mean=(129.31, 124.06, 112.43),
    std=(68.16, 65.38, 70.43),
)


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
    if not folder.is_dir():
        _download(kind, folder)
    return {"train": _joined(folder, kind.train, kind.label_key), "test": _joined(folder, kind.test, kind.label_key)}


def _joined(folder: Path, files: Mapping[str, str], label_key: str) -> tuple[Array, Array]:
    """Return the images (N, 32, 32, 3) and labels (N,) of several files."""
    images, labels = zip(*(_read(folder / name, md5, label_key) for name, md5 in files.items()), strict=True)
    joined = np.empty((sum(map(len, images)), 32, 32, 3), np.uint8)
    return np.concatenate(images, out=joined), np.concatenate(labels)


def _read(path: Path, md5: str, label_key: str) -> tuple[Array, Array]:
    data = read_file(path, most_bytes=_MOST_BYTES, through_links=True) if path.is_file() else b""
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
        raise RequestError(
            f"{path} is missing or not the official file: it has {len(data):,} bytes, whose md5 is not {md5}; "
            f"remove {path.parent} and allow --download, or unpack the official archive there."
        )
    pixels, labels, key = b"", list[int](), ""
    for opcode, argument, _ in pickletools.genops(data):
        if isinstance(argument, str):
            key = argument
            pixels = argument.encode("latin-1") if len(argument) >= _PIXELS else pixels
        elif isinstance(argument, int) and opcode.name.startswith("BININT") and key == label_key:
            labels.append(argument)
        if 0 < len(pixels) == len(labels) * _PIXELS:
            break  # what follows is the files' names, two thirds of the opcodes
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, np.uint8)


def _download(kind: Cifar, folder: Path) -> None:
    """Download the set's folder atomically. Interrupted downloads and concurrent nodes leave no partial folder."""
    try:
        from torchvision.datasets.utils import download_and_extract_archive

        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as fresh:
            download_and_extract_archive(kind.url, fresh, md5=kind.archive_md5)
            with contextlib.suppress(OSError):  # another node on the same file system may have been faster
                (Path(fresh) / folder.name).rename(folder)
    except (OSError, RuntimeError, ImportError) as error:  # no network, no room; another md5; no torchvision here
        raise RequestError(
            f"{kind.url} cannot be downloaded into {folder.parent} ({error}); fetch it by hand and unpack it there."
        ) from error
