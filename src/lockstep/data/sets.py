"""The table of data sets: from the name in the config to the sources that the engine reads.

    digits       1,797 real handwritten digits of 8 × 8 pixels, in the package
    cifar10      60,000 photographs of 32 × 32 pixels in 10 classes; downloaded with checksums
    cifar100     the same in 100 classes
    imagefolder  your photographs, as ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, with ROOT/test or without
    fake         synthetic images of any size and number, for measuring
    module:attribute   your own: a function that returns two data sets of torch, or three

Importing this module does not import torch, so that the command can list and check names at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import own
from ..config import DataConfig
from ..errors import RequestError, unknown
from . import cifar, tree

if TYPE_CHECKING:
    import torch

    from ..world import World
    from .source import Splits, Wish


def _no_check(config: DataConfig) -> None:
    """Nothing can be missing."""


def _digits(wish: Wish) -> Splits:
    from . import digits, resident

    kind = resident.ImageSet(
        classes=digits.CLASSES, height=digits.SIDE, width=digits.SIDE, mean=(digits.MEAN,), std=(digits.STD,)
    )
    return resident.build(wish, kind, digits.read)


def _cifar(name: str) -> _Entry:
    official = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}[name]

    def build(wish: Wish) -> Splits:
        from . import resident

        kind = resident.ImageSet(
            classes=official.classes, height=cifar.SIDE, width=cifar.SIDE, mean=official.mean, std=official.std
        )
        return resident.build(wish, kind, lambda: cifar.read(official, wish.config))

    return _Entry(build, lambda config: cifar.check(official, config), ("data-dir", "download", "on-device"))


def _imagefolder(wish: Wish) -> Splits:
    from . import folder

    return folder.build(wish)


def _fake(wish: Wish) -> Splits:
    from . import fake

    return fake.build(wish)


def _find_own(config: DataConfig) -> None:
    own.check("--data", config.name)


def _own(wish: Wish) -> Splits:
    from . import users

    return users.build(wish)


@dataclass(frozen=True)
class _Entry:
    """How a data set is built, and what is checked before any process starts."""

    build: Callable[[Wish], Splits]
    check: Callable[[DataConfig], None] = _no_check
    options: tuple[str, ...] = ()
    """Flags that it reads and not every data set does."""


def _table() -> dict[str, _Entry]:
    return {
        "digits": _Entry(_digits, options=("on-device",)),
        "cifar10": _cifar("cifar10"),
        "cifar100": _cifar("cifar100"),
        "imagefolder": _Entry(_imagefolder, tree.check, ("data-dir", "workers", "image-size", "skip-corrupt")),
        "fake": _Entry(_fake, options=("image-size", "samples")),
    }


def readers() -> dict[str, tuple[str, ...]]:
    """Return, for each flag that not every data set reads, the names of those that do.

    One of the user's own may read them all: its function is handed the `DataConfig`.
    """
    table = _table()
    flags = sorted({flag for entry in table.values() for flag in entry.options})
    return {flag: tuple(name for name, entry in table.items() if flag in entry.options) for flag in flags}


def names() -> tuple[str, ...]:
    """Return the names of the data sets."""
    return tuple(_table())


def _entry(config: DataConfig) -> _Entry:
    if ":" in config.name:
        return _Entry(_own, _find_own)
    table = _table()
    if config.name not in table:
        own.check_no_module("--data", config.name, "splits")
        raise unknown("data set", config.name, table, _advice(config.name))
    return table[config.name]


def _advice(name: str) -> str:
    if name and Path(name).is_dir():
        return f"A folder of photographs goes with --data imagefolder --data-dir {name}."
    return "Your own goes with module:attribute."


def preflight(config: DataConfig) -> None:
    """Raise `RequestError` for what can be seen to be impossible before any process starts; imports no torch."""
    _entry(config).check(config)


def build(config: DataConfig, *, seed: int, world: World, dtype: torch.dtype, channels_last: bool) -> Splits:
    """Return the data set's sources for this rank (*collective*).

    Batches come in `dtype` on the world's device, images in channels_last memory where asked. Raises
    `RequestError`, on every rank, where the data is missing, damaged or not what the config says.
    """
    from .source import Wish

    entry = _entry(config)
    if config.on_device == "on" and world.device.type == "cpu":
        raise RequestError(
            "--on-device on asks for an accelerator's memory, and this run computes on the CPU; use auto."
        )
    return entry.build(Wish(config=config, seed=seed, world=world, dtype=dtype, channels_last=channels_last))
