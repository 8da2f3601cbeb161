"""The user's own data set, given as module:attribute.

The attribute is a function (of nothing, or of the `DataConfig`) that returns two map-style data sets of torch,
(train, test), whose samples are (x tensor, label). A `TensorDataset` is kept in memory; any other is read sample by
sample in worker processes. x of bytes (C, H, W) is taken for an image: scaled to 0–1, and varied by --augment.
Anything else reaches the model as it is, floating-point numbers in the run's precision.

A data set may vary its samples itself, with torchvision's transforms say: for each sample the generators are seeded
from (seed, epoch, sample index), so that it is the same on any rank and in any worker.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import own
from ..config import DataConfig
from ..errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .augment import Augment
    from .resident import Normalise
    from .source import Batch, Indices, Source, Splits, Wish


_PURPOSE = {"train": 3, "test": 4, "function": 5}
"""Keeps these draws apart from each other, and from those of the other data sets."""


def check(config: DataConfig) -> None:
    """Raise `RequestError` where the module of `module:attribute` cannot be found; imports only its parents."""
    own.check("--data", config.name)


def _call(config: DataConfig) -> tuple[Any, Any]:
    """Return what the user's function returns: (train, test)."""
    asked = f"--data {config.name}"
    found = own.load("--data", config.name)
    try:
        result = found(config) if inspect.signature(found).parameters else found()
    except Exception as error:
        raise RequestError(f"{asked} {own.raised(error)}.") from error
    if not isinstance(result, tuple | list) or len(result) != 2:
        found = "nothing" if result is None else f"one {type(result).__name__}"
        found = f"{len(result)} things" if isinstance(result, tuple | list) else found
        raise RequestError(f"{asked} returned {found}; it must return two data sets, (train, test).")
    for split, dataset in zip(("train", "test"), result, strict=True):
        _check_map_style(asked, split, dataset)
    return result[0], result[1]


def _check_map_style(asked: str, split: str, dataset: Any) -> None:
    from torch.utils.data import IterableDataset

    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RequestError(
            f"{asked}: its {split} data ({kind}) cannot be read by index, which sharing it out among ranks, "
            "shuffling and resuming rest on; give a map-style data set, with __len__ and __getitem__."
        )
    if len(dataset) == 0:
        raise RequestError(f"{asked}: its {split} data ({kind}) has no sample; give at least one.")
    if (tensors := _tensors(dataset)) and (tensors[1].dim() != 1 or bool((tensors[1] != tensors[1].long()).any())):
        raise RequestError(
            f"{asked}: its {split} labels are {tensors[1].dtype} of shape {tuple(tensors[1].shape)}; give one whole "
            "number for each sample, the index of its class."
        )


def build(wish: Wish) -> Splits:
    """Return the sources of the user's data sets (*collective*)."""
    from .alike import check_alike

    splits, facts = wish.world.together(lambda: _build(wish))
    check_alike(wish.world, f"--data {wish.config.name}", facts)
    return splits


def _build(wish: Wish) -> tuple[Splits, dict[str, Any]]:
    """Return the sources, and what is known of them that has to be the same on every rank."""
    import numpy as np

    from ..randomness import kept
    from .seeding import seed_generators, seeds
    from .source import Splits

    with kept():
        # The function may draw too, to split one set in two say: the same on every rank.
        seed_generators(seeds(np.zeros(1, np.int64), wish.seed, _PURPOSE["function"])[0])
        train, test = _call(wish.config)
        classes = _classes(wish, train)
        splits = Splits(
            _source(wish, train, "train", classes, wish.config.augment),
            _source(wish, test, "test", classes, ()),
        )
    facts: dict[str, Any] = {"classes": classes, "a sample of shape": list(splits.train.shape)}
    for split, dataset in (("train", train), ("test", test)):
        facts |= {f"{split} samples": len(dataset), f"{split} labels of digest": _labels_digest(dataset)}
    return splits, facts


def _labels_digest(dataset: Any) -> str:
    """Return a hash of the labels where they are known without reading samples: a label tensor, or `targets`."""
    import numpy as np

    from .alike import digest

    tensors = _tensors(dataset)
    known = tensors[1] if tensors else getattr(dataset, "targets", None)
    try:
        return digest(np.asarray(known, np.int64))
    except (TypeError, ValueError, RuntimeError):  # none; or not labels, but boxes, texts, …
        return "unknown"


def _tensors(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """Return samples and labels of a `TensorDataset` of the two."""
    from torch.utils.data import TensorDataset

    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    return None


def _classes(wish: Wish, dataset: Any) -> int:
    """Return the number of classes: the data set's `classes` (a number or a list), else from its label tensor."""
    given = getattr(dataset, "classes", None)
    if given is None:  # a part of a data set, such as random_split makes, has the whole one as `dataset`
        given = getattr(getattr(dataset, "dataset", None), "classes", None)
    if isinstance(given, int):
        return given
    if given is not None and hasattr(given, "__len__"):
        return len(given)
    if tensors := _tensors(dataset):
        return int(tensors[1].max()) + 1
    raise RequestError(
        f"--data {wish.config.name} does not say how many classes there are; "
        "give its training set an attribute `classes`, a number or a list of names."
    )


def _source(wish: Wish, dataset: Any, split: str, classes: int, variations: tuple[str, ...]) -> Source:
    from .loader import Streamed
    from .resident import Normalise

    tensors = _tensors(dataset)
    first = tensors[0][0] if tensors else _sample(wish.config.name, split, dataset, 0, classes)[0]
    if variations and not _is_image(first):
        raise RequestError(
            f"--augment {' '.join(variations)} varies images of bytes (C, H, W), and {wish.config.name} gives "
            f"{first.dtype} {tuple(first.shape)}; give uint8 images, or --augment with no words."
        )
    normalise = None
    if _is_image(first):
        channels, height, width = first.shape
        normalise = Normalise(
            (0.0,) * channels, (255.0,) * channels, pixels=height * width, dtype=wish.dtype, device=wish.world.device
        )
    if tensors:
        _check_labels(wish.config.name, split, tensors[1], classes)
        return _resident(wish, tensors, classes, variations, normalise)
    return Streamed(
        _Samples(_Module(wish.config.name), split, wish.seed, dataset, classes, tuple(first.shape), first.dtype),
        _Finish(wish.dtype, wish.channels_last, normalise, _augment(wish, variations, first)),
        samples=len(dataset),
        classes=classes,
        shape=tuple(first.shape),
        dtype=wish.dtype if normalise or first.is_floating_point() else first.dtype,
        workers=wish.config.workers,
        stay=split == "train",
        device=wish.world.device,
    )


def _is_image(sample: Tensor) -> bool:
    import torch

    return sample.dtype == torch.uint8 and sample.dim() == 3


def _augment(wish: Wish, variations: tuple[str, ...], sample: Tensor) -> Augment:
    from .augment import Augment

    height, width = (sample.shape[1], sample.shape[2]) if sample.dim() == 3 else (0, 0)
    return Augment(variations, wish.seed, height, width)


def _resident(
    wish: Wish, tensors: tuple[Tensor, Tensor], classes: int, variations: tuple[str, ...], normalise: Normalise | None
) -> Source:
    import torch

    from .resident import ResidentImages, ResidentTensors, belongs_on_device

    device = wish.world.device
    samples, labels = tensors[0], tensors[1].to(device, torch.int64)
    if normalise is None:
        kept = samples.to(wish.dtype) if samples.is_floating_point() else samples
        kept = kept.to(device) if belongs_on_device(wish, kept.nbytes) else kept
        return ResidentTensors(kept, labels, classes=classes, channels_last=wish.channels_last)
    pixels = samples.permute(0, 2, 3, 1).reshape(-1, samples.shape[1])
    pixels = torch.cat([pixels, torch.zeros_like(pixels[:1])])
    return ResidentImages(
        pixels.to(device) if belongs_on_device(wish, pixels.nbytes) else pixels,
        labels,
        classes=classes,
        augment=_augment(wish, variations, samples[0]),
        normalise=normalise,
        channels_last=wish.channels_last,
    )


def _check_labels(name: str, split: str, labels: Tensor, classes: int) -> None:
    outside = ((labels < 0) | (labels >= classes)).nonzero()
    if len(outside):
        index = int(outside[0])
        raise _outside(name, split, index, int(labels[index]), classes)


def _outside(name: str, split: str, index: int, label: int, classes: int) -> RequestError:
    return RequestError(
        f"--data {name}: {split} sample {index} has label {label}, but there are {classes} classes, 0 to {classes - 1}."
    )


def _sample(name: str, split: str, dataset: Any, index: int, classes: int) -> tuple[Tensor, int]:
    """Return one sample, checked. Raises `RequestError` where it is not an (x tensor, label) of the classes."""
    import torch

    sample = dataset[index]
    if not isinstance(sample, tuple | list) or len(sample) != 2 or not isinstance(sample[0], torch.Tensor):
        raise RequestError(f"--data {name}: {split} sample {index} is not an (x tensor, label) pair.")
    try:
        given = sample[1].item() if isinstance(sample[1], torch.Tensor) else sample[1]
        label = int(given)
    except (TypeError, ValueError, RuntimeError):  # several numbers, a word, nothing
        given, label = None, 0
    if label != given:
        shown = " ".join(repr(sample[1]).split())[:80]
        raise RequestError(
            f"--data {name}: {split} sample {index} has label {shown}; give a whole number from 0 to {classes - 1}."
        )
    if not 0 <= label < classes:
        raise _outside(name, split, index, label, classes)
    return sample[0], label


@dataclass(frozen=True)
class _Module:
    """The user's module, which a worker that was not forked imports, from the current folder too, on receiving this."""

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (self.name,)


def _imported(name: str) -> _Module:
    own.load("--data", name)
    return _Module(name)


@dataclass(frozen=True)
class _Samples:
    """What a worker runs: makes batches of a map-style data set's samples, whose randomness comes from `seed`."""

    module: _Module
    """Before `dataset`, since fields are unpickled in order and its class is found in this module."""
    split: str
    seed: int
    dataset: Any
    classes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, epoch: int, share: Indices) -> Batch:
        """Return x (n, *shape) and y (n,)."""
        import torch

        from ..randomness import kept
        from .seeding import seed_generators, seeds

        own_seeds = seeds(share, self.seed, epoch, _PURPOSE[self.split])
        x = torch.empty((len(share), *self.shape), dtype=self.dtype)
        y = torch.empty(len(share), dtype=torch.int64)
        with kept():
            for place, index in enumerate(share.tolist()):
                seed_generators(own_seeds[place])
                try:
                    sample, label = _sample(self.module.name, self.split, self.dataset, index, self.classes)
                except Exception as error:
                    error.add_note(f"{self.split} sample {index} of --data {self.module.name}")
                    raise
                if sample.shape != self.shape or sample.dtype != self.dtype:
                    raise RequestError(
                        f"--data {self.module.name}: {self.split} sample {index} is {sample.dtype} "
                        f"{tuple(sample.shape)}, sample 0 is {self.dtype} {self.shape}; all must be alike."
                    )
                x[place], y[place] = sample, label
        return x, y


@dataclass(frozen=True)
class _Finish:
    """Turns a worker's batch (n, *shape) on the device into what the engine wants."""

    dtype: torch.dtype
    channels_last: bool
    normalise: Normalise | None
    augment: Augment

    def __call__(self, x: Tensor, share: Indices, epoch: int) -> Tensor:
        import torch

        from .resident import channels_first

        if self.normalise is None:
            turned = self.channels_last and x.dim() == 4
            order = torch.channels_last if turned else torch.preserve_format
            return x.to(dtype=self.dtype if x.is_floating_point() else x.dtype, memory_format=order)
        draws = self.augment.draw(self.augment.keys(epoch), share)
        moved = self.augment.move(x.permute(0, 2, 3, 1).contiguous(), draws)
        return channels_first(self.augment.cut(self.normalise(moved), draws), channels_last=self.channels_last)
