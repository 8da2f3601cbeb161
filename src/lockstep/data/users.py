"""The user's own data set, given as module:attribute; and any map-style data set as a source.

The attribute is a function (of nothing, or of the `DataConfig`) that returns two map-style data sets of torch,
(train, test), or three, (train, validation, test), whose samples are (x tensor, label). A `TensorDataset` is kept in
memory; any other is read sample by sample in worker processes (see `feed.py`). x of bytes (C, H, W) is taken for an
image: scaled to 0–1, and varied by --augment. Anything else reaches the model as it is, floating-point numbers in the
run's precision. What goes wrong in a worker is raised here as one sentence instead of a trace through three processes.

A data set may vary its samples itself, with torchvision's transforms say; samples that --holdout takes off such a
training set are varied too, always alike.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate, get_worker_info

from .. import hardware, user_code
from ..config.schema import DataConfig
from ..errors import LockstepError, RequestError, RunError
from ..monitor.failures import one_line, place
from ..world.random_state import kept
from . import counter
from .alike import COMPARED, Signature, check_alike, compare, digest, signature, stable
from .augment import Augment
from .feed import GENERATORS, Drawing, Feed, Seeded, seed
from .resident import Normalise, ResidentImages, ResidentTensors, belongs_on_device, channels_first
from .source import SPLITS, Fetched, Indices, Source, Splits, Wish

PREFETCH = 2
"""Shares that each worker prepares ahead."""
_MOST_WORKERS = 4
"""By default."""
PURPOSE = {"train": 3, "test": 4, "function": 5, "validation": 6}
"""Keeps these draws apart from each other, and from those of the other data sets."""


def called(config: DataConfig) -> dict[str, Any]:
    """Return, by split, what the user's function returns. Raises `RequestError` where those are no two or three."""
    asked = f"--data {config.name}"
    found = user_code.load("--data", config.name)
    try:
        result = found(config) if inspect.signature(found).parameters else found()
    except Exception as error:
        raise RequestError(f"{asked} {user_code.raised(error)}.") from error
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise RequestError(
            f"{asked} returned {type(result).__name__}; it must return two data sets, (train, test), or three, "
            "(train, validation, test)."
        )
    return dict(zip(SPLITS if len(result) == 3 else ("train", "test"), result, strict=True))


def build(wish: Wish) -> Splits:
    """Return the sources of the user's data sets (*collective*)."""
    asked = f"--data {wish.config.name}"
    splits, facts, datasets = wish.world.together(lambda: _build(wish))
    check_alike(wish.world, asked, facts)
    if wish.world.size > 1:
        for split, dataset in datasets.items():
            compare(wish.world, f"{asked}: its {split} data", _signatures(wish, dataset))
    return splits


def _build(wish: Wish) -> tuple[Splits, dict[str, Any], dict[str, Any]]:
    """Return the sources, what is known of them that has to be the same on every rank, and the user's data sets."""
    with kept():
        # The function may draw too, to split one set in two say: the same on every rank.
        seed(counter.keys(GENERATORS, wish.seed, PURPOSE["function"]), 0)
        datasets = called(wish.config)
        facts: dict[str, Any] = {}
        for split, dataset in datasets.items():
            _check_map_style(f"--data {wish.config.name}", split, dataset)
            facts |= {f"{split} samples": len(dataset), f"{split} labels of digest": _labels_digest(dataset)}
        classes, names = _classes(wish, datasets["train"])

        def make(split: str, variations: tuple[str, ...]) -> Source:
            return _source(wish, datasets[split], split, classes, variations)

        splits = Splits.of(wish, make, validation="validation" in datasets, names=names)
    return splits, facts | {"classes": classes, "a sample of shape": list(splits.train.shape)}, datasets


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


def _signatures(wish: Wish, dataset: Any) -> list[Signature | None]:
    """Return what some samples are that are spread over the data set; None for what is another each time."""
    readings = []
    with kept():
        for _ in range(2):
            seed(counter.keys(GENERATORS, wish.seed, PURPOSE["function"]), 0)
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
    name, tensors = wish.config.name, _tensors(dataset)
    first = tensors[0][0] if tensors else _checked(name, split, 0, dataset[0], classes)[0]
    if variations and not _is_image(first):
        raise RequestError(
            f"--augment {' '.join(variations)} varies images of bytes (C, H, W), and {name} gives "
            f"{first.dtype} {tuple(first.shape)}; give uint8 images, or --augment with no words."
        )
    if tensors is None:
        stays = split == "train" and variations == wish.config.augment
        return Streamed(wish, dataset, split, classes=classes, variations=variations, stays=stays, like=first)
    samples, labels = tensors
    for index in ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist():
        raise _no_such_class(name, split, index, int(labels[index]), classes)
    labels = labels.to(wish.world.device, torch.int64)
    if not _is_image(first):
        samples = samples.to(wish.dtype) if samples.is_floating_point() else samples
        samples = samples.to(wish.world.device) if belongs_on_device(wish, samples.nbytes) else samples
        return ResidentTensors(samples, labels, classes=classes, channels_last=wish.channels_last)
    pixels = samples.permute(0, 2, 3, 1).reshape(-1, samples.shape[1])
    pixels = torch.cat([pixels, torch.zeros_like(pixels[:1])])
    return ResidentImages(
        pixels.to(wish.world.device) if belongs_on_device(wish, pixels.nbytes) else pixels,
        labels,
        classes=classes,
        augment=Augment(variations, wish.seed, *first.shape[1:]),
        normalise=_normalise(wish, first),
        channels_last=wish.channels_last,
    )


def _is_image(sample: Tensor) -> bool:
    return sample.dtype == torch.uint8 and sample.dim() == 3


def _normalise(
    wish: Wish, like: Tensor, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None
) -> Normalise:
    channels, height, width = like.shape
    mean, std = mean or (0.0,) * channels, std or (255.0,) * channels
    return Normalise(mean, std, pixels=height * width, dtype=wish.dtype, device=wish.world.device)


# --- a data set that is read while training goes on


def worker_count(wish: Wish) -> int:
    """Return the number of worker processes of this rank: as asked, else its share of the processors, up to 4."""
    if wish.config.workers is not None:
        return wish.config.workers
    return min(_MOST_WORKERS, max(1, hardware.cpus() // wish.world.topology.local_size))


class Streamed:
    """A map-style data set whose samples, (x like `like`, label), are read in worker processes, or in this one.

    Images of bytes are varied, and normalised by `mean` and `std` (in units of bytes). Workers stay where it `stays`.
    """

    def __init__(
        self,
        wish: Wish,
        dataset: Any,
        split: str,
        *,
        classes: int,
        variations: tuple[str, ...],
        stays: bool,
        like: Tensor,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        skipped: tuple[str, ...] = (),
    ) -> None:
        self.classes, self.skipped = classes, skipped
        self.shape = tuple(like.shape)
        self.dtype = wish.dtype if _is_image(like) or like.is_floating_point() else like.dtype
        self._samples, self._device, self._channels_last = len(dataset), wish.world.device, wish.channels_last
        self._normalise = _normalise(wish, like, mean, std) if _is_image(like) else None
        self._augment = Augment(variations, wish.seed, *(like.shape[1:] if _is_image(like) else (0, 0)))
        workers = worker_count(wish)
        self._feed = Feed(
            _Batches(_Name(wish.config.name), split, wish.seed, dataset, classes, self.shape, like.dtype),
            stays=stays,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            pin_memory=self._device.type == "cuda",
        )

    def __len__(self) -> int:
        return self._samples

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield x and y for each share. One stream at a time; a new one ends the one before.

        Raises `RequestError` for a sample that cannot be used, `RunError` where a data set's own code failed, and
        torch's RuntimeError, which may come at any moment, for a worker process that died.
        """
        answers = self._feed.answers((epoch, share) for share in shares)
        for share, x, y in self._read(answers):
            x, y = (part.to(self._device, non_blocking=True) for part in (x, y))
            yield Fetched(self._finished(x, share, epoch), y, share)

    def _read(self, answers: Iterator[Any]) -> Iterator[tuple[Indices, Tensor, Tensor]]:
        while True:
            try:
                answer = next(answers, None)
            except (OSError, EOFError) as error:
                self._feed.raise_death(error)
            if answer is None:
                return
            if isinstance(answer, LockstepError):
                raise answer
            yield answer

    def _finished(self, x: Tensor, share: Indices, epoch: int) -> Tensor:
        """Return a batch (n, *shape) on the device as the engine wants it."""
        if self._normalise is None:
            turned = self._channels_last and x.dim() == 4
            return x.to(self.dtype, memory_format=torch.channels_last if turned else torch.preserve_format)
        draws = self._augment.draw(self._augment.keys(epoch), share)
        moved = self._augment.move(x.permute(0, 2, 3, 1).contiguous(), draws)
        return channels_first(self._augment.cut(self._normalise(moved), draws), channels_last=self._channels_last)

    def close(self) -> None:
        """End the workers."""
        self._feed.close()


@dataclass(frozen=True)
class _Batches:
    """What a worker reads: for (epoch, share) the batch of a data set's samples, which are drawn from `seed`."""

    name: _Name
    """Before `dataset`, since fields are unpickled in order and its class is found in this module."""
    split: str
    seed: int
    dataset: Any
    classes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    drawing: Drawing = field(default_factory=Drawing)

    def __getitem__(self, task: tuple[int, Indices]) -> tuple[Indices, Tensor, Tensor] | LockstepError:
        """Return the share, x (n, *shape) and y (n,); or the error that is to be raised in the rank's process."""
        epoch, share = task
        try:
            keys = counter.keys(GENERATORS, self.seed, epoch, PURPOSE[self.split])
            return share, *self._batch(share, self.drawing.read(self._read, Seeded(keys, share)))
        except RequestError as error:
            return error
        except (Exception, SystemExit, GeneratorExit, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and get_worker_info() is None:
                raise  # the user's: a worker's can only be the data set's own
            where = "".join(f" at {note}," for note in getattr(error, "__notes__", ()))
            sentence = f"The data set failed{where}{place(error)}: {one_line(error)}"
            return RunError(sentence, trace=traceback.format_exc())

    def _read(self, indices: Iterable[int]) -> list[Any]:
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except BaseException as error:
                error.add_note(f"{self.split} sample {index} of --data {self.name}")
                raise
        return samples

    def _batch(self, share: Indices, samples: list[Any]) -> tuple[Tensor, Tensor]:
        # All at once: to look at each sample takes as long as a small net's step.
        with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            x, given = default_collate(samples)
            y = given.long()
            if x.shape == (len(share), *self.shape) and x.dtype == self.dtype and y.shape == (len(share),):
                low, high = y.aminmax()
                if low >= 0 and high < self.classes and (given is y or torch.equal(y.to(given.dtype), given)):
                    return x, y
        # What torch does not collate; else the first sample that is of another kind is named.
        x = torch.empty((len(share), *self.shape), dtype=self.dtype)
        y = torch.empty(len(share), dtype=torch.int64)
        for at, (index, sample) in enumerate(zip(share.tolist(), samples, strict=True)):
            found, y[at] = _checked(self.name, self.split, index, sample, self.classes)
            if found.shape != self.shape or found.dtype != self.dtype:
                raise RequestError(
                    f"--data {self.name}: {self.split} sample {index} is {found.dtype} {tuple(found.shape)}, sample 0 "
                    f"is {self.dtype} {self.shape}; all must be alike."
                )
            x[at] = found
        return x, y


class _Name(str):
    """A data set's name, on receiving which a worker that was not forked imports the user's module."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (str(self),)


def _imported(name: str) -> _Name:
    if ":" in name:
        user_code.load("--data", name)
    return _Name(name)


def _checked(name: str, split: str, index: int, sample: Any, classes: int) -> tuple[Tensor, int]:
    """Return the sample. Raises `RequestError` where it is not an (x tensor, label) of the classes."""
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
        raise _no_such_class(name, split, index, label, classes)
    return sample[0], label


def _no_such_class(name: str, split: str, index: int, label: int, classes: int) -> RequestError:
    return RequestError(
        f"--data {name}: {split} sample {index} has label {label}, but the classes are 0 to {classes - 1}."
    )
