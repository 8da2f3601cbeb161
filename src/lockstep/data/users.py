"""The user's own data set, given as module:attribute.

The attribute is a function (of nothing, or of the `DataConfig`) that returns two map-style data sets of torch,
(train, test), or three, (train, validation, test), whose samples are (x tensor, label). A `TensorDataset` is kept in
memory; any other is read sample by sample in worker processes. x of bytes (C, H, W) is taken for an image: scaled to
0–1, and varied by --augment. Anything else reaches the model as it is, floating-point numbers in the run's precision.

A data set may vary its samples itself, with torchvision's transforms say (see `mapped.py`); samples that --holdout
takes off such a training set are varied too, always alike.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from .. import own
from ..config import DataConfig
from ..errors import RequestError
from ..randomness import kept
from .alike import check_alike, digest
from .augment import Augment
from .content import COMPARED, Signature, compare, signature, stable
from .loader import Streamed, worker_count
from .mapped import PURPOSE, Finish, Module, Samples, checked, no_such_class
from .resident import Normalise, ResidentImages, ResidentTensors, belongs_on_device
from .seeding import seed_generators, seeds
from .source import SPLITS, Source, Splits, Wish


def called(config: DataConfig) -> dict[str, Any]:
    """Return, by split, what the user's function returns. Raises `RequestError` where those are no two or three."""
    asked = f"--data {config.name}"
    found = own.load("--data", config.name)
    try:
        result = found(config) if inspect.signature(found).parameters else found()
    except Exception as error:
        raise RequestError(f"{asked} {own.raised(error)}.") from error
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        found = "nothing" if result is None else f"one {type(result).__name__}"
        found = f"{len(result)} things" if isinstance(result, tuple | list) else found
        raise RequestError(
            f"{asked} returned {found}; it must return two data sets, (train, test), or three, (train, validation, "
            "test)."
        )
    return dict(zip(SPLITS if len(result) == 3 else ("train", "test"), result, strict=True))


def _check_map_style(asked: str, split: str, dataset: Any) -> None:
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
    splits, facts, datasets = wish.world.together(lambda: _build(wish))
    check_alike(wish.world, f"--data {wish.config.name}", facts)
    if wish.world.size > 1:
        for split, dataset in datasets.items():
            compare(wish.world, f"--data {wish.config.name}: its {split} data", _samples(wish, dataset))
    return splits


def _build(wish: Wish) -> tuple[Splits, dict[str, Any], dict[str, Any]]:
    """Return the sources, what is known of them that has to be the same on every rank, and the user's data sets."""
    with kept():
        # The function may draw too, to split one set in two say: the same on every rank.
        seed_generators(seeds(np.zeros(1, np.int64), wish.seed, PURPOSE["function"])[0])
        datasets = called(wish.config)
        for split, dataset in datasets.items():
            _check_map_style(f"--data {wish.config.name}", split, dataset)
        classes, names = _classes(wish, datasets["train"])

        def make(split: str, variations: tuple[str, ...]) -> Source:
            return _source(wish, datasets[split], split, classes, variations)

        splits = Splits.of(wish, make, validation="validation" in datasets, names=names)
    facts: dict[str, Any] = {"classes": classes, "a sample of shape": list(splits.train.shape)}
    for split in SPLITS:
        dataset = datasets.get(split, ())
        facts |= {f"{split} samples": len(dataset), f"{split} labels of digest": _labels_digest(dataset)}
    return splits, facts, datasets


def _samples(wish: Wish, dataset: Any) -> list[Signature | None]:
    """Return what some samples are that are spread over the data set; None for what is another each time."""
    readings = []
    with kept():
        for _ in range(2):
            seed_generators(seeds(np.zeros(1, np.int64), wish.seed, PURPOSE["function"])[0])
            try:
                found = [signature(dataset[int(at)]) for at in np.linspace(0, len(dataset) - 1, COMPARED)]
            except Exception:  # who reads that sample later tells
                return [None]
            readings.append(found)
    return list(map(stable, zip(*readings, strict=True)))


def _labels_digest(dataset: Any) -> str:
    """Return a hash of the labels where they are known without reading samples: a label tensor, or `targets`."""
    tensors = _tensors(dataset)
    known = tensors[1] if tensors else getattr(dataset, "targets", None)
    try:
        return digest(np.asarray(known, np.int64))
    except (TypeError, ValueError, RuntimeError):  # none; or not labels, but boxes, texts, …
        return "unknown"


def _tensors(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """Return samples and labels of a `TensorDataset` of the two."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    return None


def _classes(wish: Wish, dataset: Any) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes, by the data set's `classes` (a number or a list) or its label tensor, and names."""
    given = getattr(dataset, "classes", None)
    if given is None:  # a part of a data set, such as random_split makes, has the whole one as `dataset`
        given = getattr(getattr(dataset, "dataset", None), "classes", None)
    if isinstance(given, int):
        return given, ()
    if given is not None and hasattr(given, "__len__"):
        return len(given), tuple(map(str, given))
    if tensors := _tensors(dataset):
        return int(tensors[1].max()) + 1, ()
    raise RequestError(
        f"--data {wish.config.name} does not say how many classes there are; "
        "give its training set an attribute `classes`, a number or a list of names."
    )


def _source(wish: Wish, dataset: Any, split: str, classes: int, variations: tuple[str, ...]) -> Source:
    tensors = _tensors(dataset)
    first = tensors[0][0] if tensors else checked(wish.config.name, split, 0, dataset[0], classes)[0]
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
        Samples(Module(wish.config.name), split, wish.seed, dataset, classes, tuple(first.shape), first.dtype),
        Finish(wish.dtype, wish.channels_last, normalise, _augment(wish, variations, first)),
        samples=len(dataset),
        classes=classes,
        shape=tuple(first.shape),
        dtype=wish.dtype if normalise or first.is_floating_point() else first.dtype,
        workers=worker_count(wish),
        stay=split == "train" and variations == wish.config.augment,
        device=wish.world.device,
    )


def _is_image(sample: Tensor) -> bool:
    return sample.dtype == torch.uint8 and sample.dim() == 3


def _augment(wish: Wish, variations: tuple[str, ...], sample: Tensor) -> Augment:
    height, width = (sample.shape[1], sample.shape[2]) if sample.dim() == 3 else (0, 0)
    return Augment(variations, wish.seed, height, width)


def _resident(
    wish: Wish, tensors: tuple[Tensor, Tensor], classes: int, variations: tuple[str, ...], normalise: Normalise | None
) -> Source:
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
        raise no_such_class(name, split, index, int(labels[index]), classes)
