"""Registry of data sets: from the config's name to the sources.

    digits       1,797 real handwritten digits of 8 × 8 pixels, in the package
    cifar10      60,000 photographs of 32 × 32 pixels in 10 classes; downloaded with checksums
    cifar100     the same in 100 classes
    imagefolder  your photographs, as ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, with ROOT/test or without
    webdataset   the same in tar shards, as ROOT/train/*.tar and ROOT/val/*.tar with members KEY.jpg and KEY.cls
    fake         synthetic images of any size and number, for measuring
    module:attribute   your own: a function that returns two data sets of torch, or three

Importing this module does not import torch, so that the command can list and check names at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .. import user_code
from ..config.schema import DataConfig
from ..errors import RequestError, unknown
from . import cifar, folder, shards

if TYPE_CHECKING:
    import torch

    from ..world.world import World
    from .source import Request, Splits


class Entry(NamedTuple):
    """Data set entry: builder, check before any process starts, specific flags."""

    build: Callable[[Request], Splits]
    check: Callable[[DataConfig], object] = bool
    options: tuple[str, ...] = ()


def _by(module: str, function: str = "build") -> Callable[[Request], Splits]:
    """Return a function of a module here, imported when called."""
    return lambda request: getattr(import_module(f".{module}", __package__), function)(request)


def _cifar(kind: cifar.Cifar) -> Entry:
    def build(request: Request) -> Splits:
        from . import resident

        return resident.build(request, lambda: cifar.read(kind, request.config), kind.classes, kind.mean, kind.std)

    return Entry(build, lambda config: cifar.check(kind, config), ("data-dir", "download", "on-device"))


_USER_ENTRY = Entry(_by("users"), lambda config: user_code.check("--data", config.name))
_IMAGES = ("data-dir", "workers", "image-size", "skip-corrupt")
DATA_SETS = {
    "digits": Entry(_by("digits"), options=("on-device",)),
    "cifar10": _cifar(cifar.CIFAR10),
    "cifar100": _cifar(cifar.CIFAR100),
    "imagefolder": Entry(folder.build, folder.folders, _IMAGES),
    "webdataset": Entry(partial(folder.build, scan=shards.scan), folder.folders, _IMAGES),
    "fake": Entry(_by("resident", "fake"), options=("image-size", "samples")),
}


def readers() -> dict[str, tuple[str, ...]]:
    """Return, per specific flag, the data sets that read it. The user's may read all flags."""
    flags = sorted({flag for entry in DATA_SETS.values() for flag in entry.options})
    return {flag: tuple(name for name, entry in DATA_SETS.items() if flag in entry.options) for flag in flags}


def _entry(name: str) -> Entry:
    if ":" in name:
        return _USER_ENTRY
    if name not in DATA_SETS:
        advice = "Your own goes with module:attribute."
        if name and Path(name).is_dir():
            advice = f"A folder of photographs goes with --data imagefolder --data-dir {name}."
        raise unknown("data set", name, DATA_SETS, advice)
    return DATA_SETS[name]


def preflight(config: DataConfig) -> None:
    """Raise `RequestError` for impossible data before any process starts. Imports no torch."""
    _entry(config.name).check(config)


def build(
    config: DataConfig,
    *,
    seed: int,
    world: World,
    dtype: torch.dtype,
    channels_last: bool,
    look: folder.Look | None = None,
) -> Splits:
    """Return the data set's sources for this rank (*collective*).

    Raises `RequestError`, on every rank, if the data is missing, damaged or contradicts the config.
    """
    from .source import Request

    if config.on_device == "on" and world.device.type == "cpu":
        raise RequestError("--on-device on needs a GPU, and this run is on the CPU; use auto.")
    request = Request(config=config, seed=seed, world=world, dtype=dtype, channels_last=channels_last, look=look)
    return _entry(config.name).build(request)
