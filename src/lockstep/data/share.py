"""This rank's share of a user's DataLoader.

Order and each sample's random draws are functions of (seed, epoch, sample index), on any number of ranks and workers. A
collate function's draws depend on (seed, epoch, first sample of the share) and, like dropout, on the shares.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from ..batching import BatchPlan, Share
from ..errors import RequestError
from ..world.random_state import preserve_generators
from ..world.world import World
from . import counter
from .feed import GENERATORS, MIXES, PACKS, Batches, Feed, Mark, Stream, seed
from .order import ASCENDING, OF_A_SAMPLER, SHUFFLED, Order
from .ranks import Signature, check_alike, compare, digest, spread
from .source import Indices
from .transfer import map_ahead, moved

_GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_TRAINING, _EVALUATION, _SAMPLER = 6, 7, 8
"""Purposes of draws: each has separate random numbers, also from those of lockstep's data sets."""
_MOST_MARKS = 64
"""A loop may read so many batches of a stream before it trains the first of them."""


class Micro(NamedTuple):
    """This rank's share of one global micro-batch.

    `batch` is the output of the user's collate function, on the device. `indices` (size,) are those of the samples, or
    for a stream their positions in this epoch.
    """

    batch: Any
    share: Share
    indices: Indices

    @property
    def size(self) -> int:
        """Number of samples that count; 0 for an empty share, whose batch is a stand-in sample."""
        return self.share.size


_Shares = Iterator[tuple[Indices, Share]]
"""(indices of the samples to read, share). An empty share reads one stand-in sample."""


class Micros:
    """Iterator over micro-batches; `close` ends its reader."""

    def __init__(self, micros: Iterator[Micro], reader: Any) -> None:
        self._micros, self._reader = micros, reader

    def __iter__(self) -> Iterator[Micro]:
        return self

    def __next__(self) -> Micro:
        return next(self._micros)

    def close(self) -> None:
        self._reader.close()


class SharedLoader:
    """A user's DataLoader whose global batches are divided among the ranks."""

    def __init__(
        self,
        loader: DataLoader[Any],
        world: World,
        *,
        seed: int,
        accumulate: int | None = None,
        micro_batch: int | None = None,
        dtype: torch.dtype | None = None,
        evaluates: bool = False,
    ) -> None:
        """Check and plan the shares (*collective*). Casts floating-point tensors to `dtype`, if given.

        `accumulate` and `micro_batch` are those of `BatchPlan.solve`; a loader that only `evaluates` has neither.
        Raises `RequestError` on every rank for loaders that cannot be shared, and for data that differ between ranks.
        """
        self.loader, self._world, self._seed = loader, world, seed
        self._trial = copy.copy(getattr(loader, "sampler", None))  # a sampler may count its draws
        self._drawn_epochs = 0
        self._sampler_epoch = getattr(self._trial, "epoch", None)  # as the sampler was, or as it was set here
        self.order_digest = ""
        """Digest of the order of the last pass, if the user's sampler draws it."""

        def plan() -> tuple[BatchPlan, Indices | None]:
            size = _global_batch(loader)
            is_stream = isinstance(loader.dataset, IterableDataset)
            order = None if is_stream or _is_standard(loader.sampler) else self._first_order()
            if evaluates:  # shares may be empty
                return BatchPlan(global_size=size, ranks=world.size, accumulation=1), order
            return BatchPlan.solve(size, world.size, micro_size=micro_batch, accumulation=accumulate), order

        self.plan, self._sampler_order = world.together(plan)
        self.drop_last, self._is_stream = loader.drop_last, isinstance(loader.dataset, IterableDataset)
        self.counts_itself = self._sampler_order is not None and not np.array_equal(
            self._sampler_order, self._first_order()
        )
        """Whether the sampler's order depends on the number of its earlier draws."""
        order_digest = "" if self._sampler_order is None else digest(self._sampler_order)
        facts = {"global batch": self.plan.global_size, "samples": self.samples, "order of digest": order_digest}
        check_alike(world, "The DataLoader", facts)
        self.workers = min(loader.num_workers, 1) if self._is_stream else loader.num_workers
        self._options: dict[str, Any] = {
            "begin": loader.worker_init_fn,
            "num_workers": self.workers,
            "pin_memory": loader.pin_memory and world.device.type != "cpu",
            **{name: getattr(loader, name) for name in ("timeout", "multiprocessing_context", "prefetch_factor")},
        }
        self._feed = Feed(Batches(loader.dataset, loader.collate_fn), stays=loader.persistent_workers, **self._options)
        self._destination = (world.device, dtype, loader.pin_memory)
        # A DataLoader's batches are on the CPU: there `Tensor.to` would have nothing to do.
        self._moves = world.device.type != "cpu" or dtype is not None
        self._signatures: list[Signature | None] | None = None
        """Signatures of the samples to compare, once they are read; None for a sample that varies."""
        self._collation = ""
        self._pass = [0, 0]
        """Epoch of the last training pass over a stream, and earlier passes over it."""
        self._marks: dict[int, Mark] = {}
        """By number of batches of that pass: where the stream is after them."""
        self._saved: list[Any] = []  # the `place` that a resumed run continues from
        self.has_changed = False
        """Whether a stream's samples differ from those that the resumed run has read."""
        self.is_compared = world.group is None and self.plan.accumulation == 1

    @property
    def cautions(self) -> list[str]:
        """Sentences on behaviour that a resumed run, or a run on other ranks, may not repeat."""
        lines, dataset = list[str](), self.loader.dataset
        if self.counts_itself:
            lines.append("the sampler's order depends on how often it was drawn: a resumed run draws it as often")
        if names := [name for name, value in state_of(dataset).items() if isinstance(value, _GENERATOR_TYPES)]:
            lines.append(
                f"the data set has a separate random generator ({', '.join(names)}): samples that draw from it "
                "depend on ranks and workers, and no checkpoint holds its state; draw from torch's, NumPy's or "
                "Python's global generator, which are seeded for each sample"
            )
        if hasattr(dataset, "state_dict") and not self._is_stream:
            lines.append(
                "the data set's state_dict is not used: a resumed run goes on at its step by the order of the samples"
            )
        return lines

    @property
    def order(self) -> str:
        """The order of an epoch's samples."""
        if self._is_stream or self._sampler_order is not None:
            return OF_A_SAMPLER
        return SHUFFLED if isinstance(self.loader.sampler, RandomSampler) else ASCENDING

    @property
    def _length(self) -> int | None:
        """Number of samples in an epoch that begins now: a data set may grow or shrink between epochs."""
        if self._sampler_order is not None:
            return len(self._sampler_order)
        counted: Any = self.loader.dataset if self._is_stream else self.loader.sampler
        return len(counted) if hasattr(counted, "__len__") else None  # a stream may yield another number

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch; None for a stream."""
        return None if self._is_stream else self._length

    @property
    def index_bound(self) -> int:
        """Exclusive upper bound of the sample indices; 0 for a stream."""
        dataset: Any = self.loader.dataset
        if self._sampler_order is None or not hasattr(dataset, "__len__"):
            return self.samples or 0
        return max(len(dataset), len(self._sampler_order))  # a sampler may choose some of the data set's samples

    def epoch_order(self, epoch: int, drawn_as: int | None = None) -> Callable[[int, int], Indices]:
        """Return the training order of `epoch`: a function from positions [start, stop) to sample indices.

        `drawn_as` replaces `epoch` in the seed of a further pass. Raises `RequestError` if a sampler changes its
        length.
        """
        samples, drawn_as = self._length or 0, epoch if drawn_as is None else drawn_as
        if self.order == SHUFFLED:
            return Order(samples, seed=self._seed, epoch=drawn_as).indices
        if self._sampler_order is None:
            return np.arange
        order = self._draw(self.loader.sampler, epoch, drawn_as)
        self._drawn_epochs = epoch + 1
        if len(order) != samples:
            raise RequestError(
                f"The DataLoader's sampler, a {type(self.loader.sampler).__name__}, yields {len(order)} samples in "
                f"epoch {epoch}, and {samples} in epoch 0; let it yield as many in each."
            )
        self.order_digest = digest(order)
        return lambda start, stop: order[start:stop]

    def steps(self) -> int | None:
        """Return the number of global batches per epoch; None for a stream without a length."""
        length = self._length
        return None if length is None else self.plan.steps(length, drop_last=self.drop_last)

    def micros(self, epoch: int, *, first: int = 0, again: int = 0) -> Micros:
        """Yield this rank's training shares from global batch `first`, equally many on every rank.

        `again` counts earlier passes over the same epoch: each pass has a different order and different draws. Raises
        `RequestError` if a sampler changes its length; errors of the user's code propagate.
        """
        return self._micros(_TRAINING, epoch, first, again)

    def shares(self) -> Micros:
        """Yield this rank's evaluation shares: each sample once, in ascending order.

        Drops no batch; no share is empty unless there are fewer samples than ranks.
        """
        return self._micros(_EVALUATION)

    def compare(self) -> list[str]:
        """Compare the ranks' samples once all ranks have read; return warnings (*collective*).

        Raises `RequestError` on every rank for different samples.
        """
        if not all(self._world.gather(self._signatures is not None)):
            return []
        self.is_compared = True
        warnings = [compare(self._world, "The DataLoader", self._signatures or [])]
        if self._collation == MIXES:
            warnings.append(
                "the collate function computes samples from others in the batch, or draws random numbers for all of "
                "them. It is called with each rank's part of a global micro-batch, so that the data depend on the "
                "number of ranks: do that in the data set, or in the loop under draws='global'"
            )
        elif self._collation == PACKS:
            warnings.append(
                "the collate function makes tensors with several rows for a sample, such as tokens or nodes: if the "
                "loss is a mean over them rather than over the samples, give their number, as in "
                "session.backward(loss, weight=n)"
            )
        return [*filter(None, warnings)]

    def close(self) -> None:
        """End the workers and wait. Workers stuck in a sample are killed after seconds."""
        self._feed.close()

    def _micros(self, purpose: int, epoch: int = 0, first: int = 0, again: int = 0) -> Micros:
        drawn_as = epoch + (again << 32)
        keys = counter.keys(GENERATORS, self._seed, drawn_as, purpose)
        tasks: Iterator[Any] = iter(())
        if self._is_stream:
            spare = self._world.size if purpose == _EVALUATION else 0
            marks = self._continue([epoch, again], first) if purpose == _TRAINING else []
            stream = Stream(self.loader, self.plan, self._world.rank, spare, keys, epoch, first, marks)
            self._feed = Feed(stream, stays=False, **self._options)
        else:
            shares = self._training(epoch, first, drawn_as) if purpose == _TRAINING else self._evaluation()
            tasks = ((keys, *task) for task in shares)
            if self.samples and not self.is_compared and self._signatures is None:
                places = spread(self.samples)
                tasks = chain(
                    [(keys, places if self._sampler_order is None else self._sampler_order[places], None)], tasks
                )
        # No reference to a yielded batch stays here: a session checks whether the user still has the batch.
        micros: Iterator[Micro] = filter(None, map(self._to_micro, answers := self._feed.answers(keys, tasks)))
        if self._moves:
            # Without workers, nothing is read ahead: the loop may change its data set between two batches.
            move, device = self._moved, self._world.device
            micros = map_ahead(move, micros, device) if self.workers else map(move, micros)
        return Micros(micros, answers)

    def _to_micro(self, answer: tuple[Indices, Share | None, Any]) -> Micro | None:
        indices, share, batch = answer
        if share is None:
            if isinstance(batch[-1], Mark):
                self._marks.update([batch])
                self._marks.pop(batch[0] - _MOST_MARKS, None)
                return None
            signatures, collation, *is_same = batch
            self.has_changed = is_same == [False]
            if self._signatures is None:
                self._signatures, self._collation = signatures, collation
            return None
        return Micro(batch, share, indices[: share.size])

    def _moved(self, micro: Micro) -> Micro:
        return micro._replace(batch=moved(micro.batch, *self._destination))

    def _training(self, epoch: int, first: int, drawn_as: int) -> _Shares:
        samples, drop_last = self._length or 0, self.drop_last
        order = self.epoch_order(epoch, drawn_as)
        for share in self.plan.shares(samples, self._world.rank, first=first, drop_last=drop_last):
            yield order(share.start, share.stop), share

    def _evaluation(self) -> _Shares:
        chosen = None if self._sampler_order is None else np.sort(self._sampler_order)
        for share in self.plan.evaluation(self._length or 0, self._world.rank):
            read = np.arange(share.start, share.stop)
            yield read if chosen is None else chosen[read], share

    def place(self, pass_: list[int], batches: int) -> list[Any]:
        """Return where a stream is after so many batches of a pass [epoch, earlier passes]; [] if unknown."""
        if batches not in self._marks or pass_ != self._pass:
            return []
        marks = [self._marks[number] for number in (batches - 1, batches) if number in self._marks]
        return [pass_, batches, marks]

    def restore(self, place: list[Any]) -> None:
        """Continue a stream from where `place` was, once its pass is resumed."""
        self._saved = place

    def _continue(self, pass_: list[int], first: int) -> list[Mark]:
        """Begin a pass over a stream; return where it was before and after batch `first` - 1, if known."""
        marks = [Mark(*mark) for mark in self._saved[2]] if self._saved[:2] == [pass_, first] else []
        self._pass, self._saved = pass_, []
        self._marks = {first - number: mark for number, mark in enumerate(reversed(marks))}
        return marks

    def catch_up(self, epochs: int) -> None:
        """Draw from a sampler that counts its draws as often as a run of `epochs` epochs has."""
        if self.counts_itself:
            for epoch in range(self._drawn_epochs, epochs):
                self._draw(self.loader.sampler, epoch, epoch)
            self._drawn_epochs = max(self._drawn_epochs, epochs)

    def _first_order(self) -> Indices:
        """Return the first epoch's indices of a copy of the sampler."""
        sampler = self._trial
        if not hasattr(sampler, "__len__"):  # such as an endless sampler
            raise RequestError(
                f"The DataLoader's sampler, a {type(sampler).__name__}, has no length; give it a __len__."
            )
        return self._draw(sampler, 0, 0)

    def _draw(self, sampler: Any, epoch: int, drawn_as: int) -> Indices:
        """Return the sampler's indices, equal on every rank. Seeds the global generators, and restores them."""
        set_epoch = getattr(sampler, "set_epoch", None)
        if set_epoch and getattr(sampler, "epoch", None) == self._sampler_epoch:  # else the loop has set it
            set_epoch(epoch)
            self._sampler_epoch = getattr(sampler, "epoch", None)
        attributes = getattr(sampler, "__dict__", {}).values()
        generators = [value for value in attributes if isinstance(value, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        for number, generator in enumerate(generators):
            generator.manual_seed(counter.key(self._seed, drawn_as, _SAMPLER, number))
        try:
            with preserve_generators():
                seed(counter.keys(GENERATORS, self._seed, drawn_as, _SAMPLER), 0)
                return np.array([operator.index(index) for index in sampler], np.int64)
        finally:
            for generator, state in zip(generators, states, strict=True):  # the user may draw from it, too
                generator.set_state(state)


def _global_batch(loader: Any) -> int:
    """Return the loader's batch size. Raises `RequestError` for loaders that cannot be shared."""
    if not isinstance(loader, DataLoader):
        raise RequestError(f"A {type(loader).__name__} cannot be shared out; give a torch DataLoader over the data.")
    if hasattr(loader, "load_state_dict"):  # as torchdata's StatefulDataLoader
        raise RequestError(
            f"The DataLoader is a {type(loader).__name__}, whose state is not the run's: give a torch DataLoader with "
            "the same arguments; checkpoints contain its position."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise RequestError(
            f"The DataLoader is a {type(loader).__name__} with a custom __iter__, which would not be called: do its "
            "work in the data set, the collate function or the loop."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise RequestError("The DataLoader has a DistributedSampler, which shares samples out again; leave it out.")
    if loader.batch_size is None:
        option = "a batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
        raise RequestError(
            f"The DataLoader has {option}; give the global batch as batch_size, with sampler or shuffle."
        )
    return loader.batch_size


def state_of(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a data set, and of its inner `dataset`, such as a Subset's."""
    inner = getattr(dataset, "dataset", None)
    attributes = {} if inner is None else state_of(inner)
    return attributes | {name: value for name, value in getattr(dataset, "__dict__", {}).items() if name != "dataset"}


def _is_standard(sampler: Any) -> bool:
    """Return whether the sampler is sequential or a full shuffle, so that its order need not be drawn."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler
