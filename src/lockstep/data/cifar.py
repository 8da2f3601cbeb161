"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

The official Python version comes as pickles, and a pickle can run any program when it is loaded. Here none is
loaded: after the md5 of a file has been checked, its opcodes are read as a list (`pickletools.genops`), in which
the pixels are one long string and the labels are the integers behind their key. Nothing is called.

A set that is absent is downloaded into a fresh folder beside its place, checked, and moved there whole, so that an
interrupted download, or two nodes on one file system, leave nothing half done.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickletools
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..config.schema import DataConfig
from ..errors import RequestError
from .shared import Array

SIDE = 32
_PLANES = 3 * SIDE * SIDE
_STRINGS = ("BINSTRING", "SHORT_BINSTRING", "BINUNICODE")
_INTEGERS = ("BININT", "BININT1", "BININT2")


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """The official files of one of the two sets."""

    name: str
    classes: int
    folder: str
    url: str
    archive_md5: str
    train: Mapping[str, str]
    """{file: md5}"""
    test: Mapping[str, str]
    label_key: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of all pixels of the training images, in units of the stored bytes."""


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
    # The commonly published 0.5071, 0.4865, 0.4409 and 0.2673, 0.2564, 0.2762, times 255.
    mean=(129.31, 124.06, 112.43),
    std=(68.16, 65.38, 70.43),
)


def check(kind: Cifar, config: DataConfig) -> None:
    """Raise `RequestError` where the set is not there and will not be downloaded, or lacks a file."""
    folder = config.dir / kind.folder
    if config.dir.exists() and not config.dir.is_dir():
        raise RequestError(f"--data-dir {config.dir} is a file; give the folder that holds {kind.folder}.")
    if not folder.is_dir() and not config.download:
        raise RequestError(
            f"--data {kind.name} needs {folder}, which does not exist; "
            f"give --data-dir the folder that holds {kind.folder}, or allow --download."
        )
    missing = [name for name in (*kind.train, *kind.test) if not (folder / name).is_file()]
    if missing and folder.is_dir():
        raise RequestError(
            f"{folder} is incomplete: {', '.join(missing)} missing; remove the folder and allow --download, "
            f"or unpack {kind.url} in {config.dir}."
        )


def read(kind: Cifar, config: DataConfig) -> dict[str, tuple[Array, Array]]:
    """Return {"train" and "test": (images (N, 32, 32, 3) uint8, labels (N,) uint8)}, downloaded if need be.

    Raises `RequestError` for files that are missing or not the official ones.
    """
    check(kind, config)
    folder = config.dir / kind.folder
    if not folder.is_dir():
        _download(kind, config.dir)
    splits = {}
    for split, files in (("train", kind.train), ("test", kind.test)):
        images, labels = zip(*(_read(folder / name, md5, kind.label_key) for name, md5 in files.items()), strict=True)
        splits[split] = (np.concatenate(images), np.concatenate(labels))
    return splits


def _read(path: Path, md5: str, label_key: str) -> tuple[Array, Array]:
    data = path.read_bytes()
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != md5:
        raise RequestError(
            f"{path} is not the official file: its md5 is {found} ({len(data):,} bytes), expected {md5}; "
            f"remove {path.parent} and allow --download, or unpack the official archive there."
        )
    images: Array = np.empty((0, _PLANES), np.uint8)
    labels: list[int] = []
    key = ""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _STRINGS:
            assert isinstance(argument, str)
            if len(argument) >= _PLANES:
                images = np.frombuffer(argument.encode("latin-1"), np.uint8).reshape(-1, _PLANES)
            key = argument
        elif opcode.name in _INTEGERS and key == label_key:
            assert isinstance(argument, int)
            labels.append(argument)
        if 0 < len(images) == len(labels):
            break  # what follows is the files' names, two thirds of the opcodes
    return np.ascontiguousarray(images.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), np.array(labels, np.uint8)


def _download(kind: Cifar, target: Path) -> None:
    """Put the set's folder into `target` whole, or leave what was there as it was."""
    from torchvision.datasets.utils import download_url

    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{kind.folder}-", dir=target) as fresh:
            download_url(kind.url, fresh, "archive.tar.gz", kind.archive_md5)
            with tarfile.open(Path(fresh) / "archive.tar.gz") as archive:
                archive.extractall(fresh, filter="data")
            try:
                (Path(fresh) / kind.folder).rename(target / kind.folder)
            except OSError:  # another node on the same file system may have been faster; its copy is as good
                if not (target / kind.folder).is_dir():
                    raise
    except (OSError, RuntimeError) as error:  # no network, no room; another md5
        if is_new:
            with contextlib.suppress(OSError):  # another node on the same file system has put something there
                target.rmdir()
        raise RequestError(
            f"{kind.url} cannot be downloaded into {target} ({error}); fetch it by hand and unpack it there."
        ) from error
