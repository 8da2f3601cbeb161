"""User data sets, module:attribute, and any map-style data set as a source.

The attribute is a function that returns two map-style data sets of torch, (train, test), or three, (train, validation,
test), whose samples are (x tensor, label). A parameter `config`, or a first one without a default, is the `DataConfig`.
A `TensorDataset` is kept in memory. x of bytes (C, H, W) is an image: scaled to 0–1, and varied by --augment; other x
reach the model unchanged.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from .. import hardware, user_code
from ..config.schema import DataConfig, RunConfig
from ..errors import LockstepError, RequestError, RunError
from ..world.random_state import preserve_generators
from ..world.world import World
from . import counter
from .feed import GENERATORS, Batches, Feed, seed
from .images import Plain, Transform
from .ranks import Signature, check_alike, compare, digest, signature, spread
from .resident import resident
from .source import SPLITS, Fetched, Indices, Request, Source, Splits
from .transfer import map_ahead, to_device

_MOST_WORKERS = 16
"""By default: each holds two batches in shared memory."""
_COMPARED = 8
"""At most so many samples of each split are compared between ranks, and with those in a checkpoint."""
_PURPOSE = {"train": 3, "test": 4, "function": 5, "validation": 6}
"""Separates the draws of each purpose from each other, and from those of the other data sets."""


def called(config: DataConfig) -> dict[str, Any]:
    """Return the user's data sets by split. Raises `RequestError` unless the function returns two or three."""
    function = user_code.load("--data", config.name)
    try:
        result = _call(function, config)
    except Exception as error:
        raise RequestError(f"--data {config.name} {user_code.raised(error)}.") from error
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        call = f"--data {config.name} returned {type(result).__name__}"
        raise RequestError(f"{call}; it must return two data sets, (train, test), or three, (train, validation, test).")
    return dict(zip(SPLITS if len(result) == 3 else ("train", "test"), result, strict=True))


def _call(function: Callable[..., Any], config: DataConfig) -> Any:
    """Call `function` with `config` by name, or by position if its first parameter has no default."""
    parameters = inspect.signature(function).parameters
    if "config" in parameters:
        return function(config=config)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        parameter
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind in by_position
    ]
    return function(config) if needed else function()


def build(request: Request) -> Splits:
    """Return the sources of the user's data sets (*collective*)."""
    name, world = request.config.name, request.world
    keys = counter.keys(GENERATORS, request.seed, _PURPOSE["function"])

    def built() -> tuple[dict[str, Any], Splits, dict[str, list[Signature | None]]]:
        with preserve_generators():
            seed(keys, 0)  # the function may draw random numbers, too, such as to split a set in two
            datasets = called(request.config)
            for split, dataset in datasets.items():
                _check(f"--data {name}: its {split} data ({type(dataset).__name__})", dataset)
            classes, names = _classes(name, datasets["train"])

            def make(split: str, variations: tuple[str, ...]) -> Source:
                return _source(request, datasets[split], split, classes, variations)

            has_validation, labels = "validation" in datasets, _labels(datasets["train"])
            splits = Splits.of(request, make, validation=has_validation, names=names, labels=labels)
            facts: dict[str, Any] = {"splits": list(datasets), "classes": classes}
            facts["a sample of shape"] = list(splits.train.shape)
            for split, dataset in datasets.items():
                facts |= {f"{split} samples": len(dataset), f"{split} labels of digest": _digest(dataset, names)}
            signatures = {split: _signatures(name, split, dataset, keys, world) for split, dataset in datasets.items()}
            return facts, splits, signatures

    facts, splits, signatures = world.together(built)
    check_alike(world, f"--data {name}", facts)
    comparable = signatures if world.size > 1 else {}
    doubts = [compare(world, f"--data {name}: its {split} data", rows) for split, rows in comparable.items()]
    contents = {
        split: {
            "labels": facts[f"{split} labels of digest"],
            "samples": [_by_name(sample, splits.names) for sample in samples],
        }
        for split, samples in signatures.items()
    }
    return dataclasses.replace(splits, cautions=(*splits.cautions, *filter(None, doubts)), contents=contents)


def _signatures(
    name: str, split: str, dataset: Any, keys: counter.UInt64, world: World, collate: Any = default_collate
) -> list[Signature | None]:
    try:
        return Batches(dataset, collate, name, split).signatures(keys, spread(len(dataset), _COMPARED))
    except RunError:  # the run reports it when it reads the sample
        if world.size > 1:
            raise
        return []


def _by_name(values: Signature | None, names: Sequence[str]) -> Signature | None:
    """Return a sample's signature with its label's name in place of its label, which comes last in it."""
    if values is None or not (values and names and values[-1] < len(names)):
        return values
    return [*values[:-3], *signature(names[int(values[-1])])]


def content(config: RunConfig, dataset: Any, world: World) -> dict[str, Any]:
    """Return `Splits.contents` of a training set whose samples have any structure."""
    keys = counter.keys(GENERATORS, config.seed, _PURPOSE["function"])
    return {
        "labels": "",
        "samples": _signatures(config.data.name, "train", dataset, keys, world, operator.itemgetter(0)),
    }


def _check(label: str, dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise RequestError(
            f"{label} cannot be read by index; give a map-style data set (__len__ and __getitem__), or train by --step."
        )
    if len(dataset) == 0:
        raise RequestError(f"{label} has no sample; give at least one.")


def _tensors(dataset: Any) -> tuple[Tensor, Tensor] | None:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    return None


def _labels(dataset: Any) -> Indices | None:
    """Return the labels (N,) from a label tensor or `targets`; None if unknown. Read no samples."""
    if isinstance(dataset, Subset):
        of_all = _labels(dataset.dataset)
        return None if of_all is None else of_all[np.asarray(dataset.indices, np.int64)]
    pair = _tensors(dataset)
    try:
        values = np.asarray(pair[1].cpu() if pair else dataset.targets)
        with np.errstate(invalid="ignore"):
            labels = values.astype(np.int64)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # none; or no labels, but boxes, texts, …
        return None
    return labels if labels.shape == (len(dataset),) and np.array_equal(labels, values) else None


def _digest(dataset: Any, names: Sequence[str]) -> str:
    """Return a hash of the labels, by name where there are names; "" if unknown."""
    labels = _labels(dataset)
    if labels is None:
        return ""
    is_named = names and len(labels) and 0 <= labels.min() <= labels.max() < len(names)
    return digest(np.array(names)[labels] if is_named else labels)


def _classes(name: str, dataset: Any) -> tuple[int, tuple[str, ...]]:
    """Return the number and names of the classes, from the data set's `classes` or label tensor."""
    # A part of a data set, such as random_split makes, has the whole one as `dataset`.
    classes = getattr(dataset, "classes", getattr(getattr(dataset, "dataset", None), "classes", None))
    if classes is None and (pair := _tensors(dataset)):
        classes = int(pair[1].max()) + 1
    if classes is None:
        wanted = "give its training set an attribute `classes`, a number or a list of names"
        raise RequestError(f"--data {name} does not say how many classes there are; {wanted}.")
    return (classes, ()) if isinstance(classes, int) else (len(classes), tuple(map(str, classes)))


def _source(request: Request, dataset: Any, split: str, classes: int, variations: tuple[str, ...]) -> Source:
    label, pair = f"--data {request.config.name}: {split}", _tensors(dataset)
    x = _x(label, 0, dataset[0])
    is_image = x.dtype == torch.uint8 and x.dim() == 3
    if variations and not is_image:
        flag = f"--augment {' '.join(variations)} varies images of bytes (C, H, W)"
        raise RequestError(f"{flag}, and {label} has {x.dtype} {tuple(x.shape)}; give uint8 images, or no --augment.")
    transform: Transform | Plain = Plain(request, x)
    if is_image:
        transform = Transform(request, x.shape, variations, (0.0,) * len(x), (255.0,) * len(x), turns=True)
    if pair is None:
        return Streamed(request, dataset, split, classes, transform, partial(_check_sample, label, x.dtype, x.shape))
    _check_labels(label, pair[1], np.arange(len(dataset)), classes)
    return resident(request, *pair, classes, transform)


def _x(label: str, index: int, sample: Any) -> Tensor:
    if not isinstance(sample, tuple | list) or len(sample) != 2 or not isinstance(sample[0], Tensor):
        raise RequestError(
            f"{label} sample {index} is not an (x tensor, label) pair; give such pairs, or train another task than "
            "classification by --step."
        )
    return sample[0]


def _check_sample(label: str, dtype: torch.dtype, shape: torch.Size, index: int, sample: Any) -> None:
    """Raise `RequestError` for a sample whose x differs from sample 0's `dtype` or `shape`."""
    x = _x(label, index, sample)
    if (x.dtype, x.shape) != (dtype, shape):
        description = f"{x.dtype} {tuple(x.shape)}, sample 0 is {dtype} {tuple(shape)}"
        raise RequestError(f"{label} sample {index} is {description}; all must be alike.")


def _together(samples: list[Any]) -> Any:
    """Return x (n, …) and the labels of (x, label) pairs."""
    batch, first = default_collate(samples), samples[0][0]
    if isinstance(first, Tensor) and batch[0].dtype != first.dtype:  # an image folder's are NumPy's
        raise TypeError("samples of several dtypes")
    return batch


def _check_labels(label: str, y: Any, indices: Indices, classes: int) -> None:
    """Raise `RequestError` for labels that are no class indices; y (n,) are those of samples `indices` (n,)."""
    is_list = isinstance(y, Tensor) and y.dim() == 1
    if not is_list or (y.is_floating_point() and not torch.equal(y, y.trunc())):
        description = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise RequestError(
            f"{label} labels are {description}; give one whole number for each sample, the index of its class, or "
            "train another task than classification by --step."
        )
    low, high = map(int, y.long().aminmax())
    if low < 0 or high >= classes:
        position = int(((y < 0) | (y >= classes)).nonzero()[0])
        description = f"sample {indices[position]} has label {int(y[position])}"
        raise RequestError(f"{label} {description}, but the classes are 0 to {classes - 1}.")


class Streamed(Source):
    """Map-style data set of (x, label), read by worker processes or by this process.

    Workers of a training set stay from epoch to epoch. `stream` raises `RequestError` for labels that are no classes,
    `RunError` if the data set's code fails, and torch's RuntimeError, at any time, if a worker dies.
    """

    def __init__(
        self,
        request: Request,
        dataset: Any,
        split: str,
        classes: int,
        transform: Transform | Plain,
        check: Callable[[int, Any], object] | None = None,
    ) -> None:
        self.classes, self.shape, self.dtype = classes, transform.shape, transform.dtype
        name, workers, self._device = request.config.name, request.config.workers, request.world.device
        if workers is None:
            workers = min(_MOST_WORKERS, max(1, hardware.cpus() // request.world.topology.local_size))
        self._samples, self._transform, self._what = len(dataset), transform, f"--data {name}: {split}"
        self._seed, self._purpose = request.seed, _PURPOSE[split]
        reader = Batches(dataset, _together, name=name, split=split, check=check)
        pins = self._device.type != "cpu"
        self._feed = Feed(reader, stays=split == "train", num_workers=workers, pin_memory=pins)
        self._has_workers = workers > 0

    def __len__(self) -> int:
        return self._samples

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        keys = counter.keys(GENERATORS, self._seed, epoch, self._purpose)
        # True: without signatures, which compare ranks.
        answers = self._feed.answers(keys, ((keys, share, True) for share in shares))
        fetch = partial(self._fetch, epoch=epoch)
        try:
            yield from map_ahead(fetch, answers, self._device) if self._has_workers else map(fetch, answers)
        except (OSError, EOFError) as error:
            hint = "if the host ran out of memory, use fewer --workers"
            raise RunError(f"A data worker died as it sent samples ({error}): {hint}.") from error

    def _fetch(self, answer: tuple[Indices, Any, Any], epoch: int) -> Fetched:
        """Return a share that was read, on the device."""
        indices, _, batch = answer
        if isinstance(batch, LockstepError):
            raise batch
        x, y = batch
        _check_labels(self._what, y, indices, self.classes)
        draws = self._transform.draw(epoch, indices)
        x, y, draws = (to_device(tensor, self._device) for tensor in (x, y.long(), draws))
        return Fetched(self._transform(x, draws), y, indices)

    def close(self) -> None:
        self._feed.close()
