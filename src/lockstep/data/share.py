"""This rank's share of a user's DataLoader.

Order and the samples' own randomness are functions of (seed, epoch, sample index), on any number of ranks and workers.
A collate function's draws follow from (seed, epoch, first sample of the share), and like dropout differ with shares.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import random
from collections.abc import Callable, Iterator, MutableMapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from ..batching import BatchPlan, Share
from ..errors import RequestError
from ..world.random_state import preserve_generators
from ..world.world import World
from . import counter
from .feed import GENERATORS, Batches, Feed, Stream, seed
from .order import ASCENDING, OF_A_SAMPLER, SHUFFLED, Order
from .ranks import Signature, check_alike, compare, digest, spread
from .source import Indices

_OWN_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_TRAINING, _EVALUATION, _SAMPLER = 6, 7, 8
"""Keep the draws of each purpose apart from each other, and from those of the other data sets."""


class Micro(NamedTuple):
    """This rank's share of one global micro-batch.

    `batch` is collated by the user's function, on the device. `indices` (size,) are the samples'; for a stream, their
    positions in this epoch.
    """

    batch: Any
    share: Share
    indices: Indices

    @property
    def size(self) -> int:
        """Number of samples that count; 0 where the global batch's first sample stands in."""
        return self.share.size

    @property
    def total(self) -> int:
        """Number of samples in the global batch."""
        return self.share.total

    @property
    def last(self) -> bool:
        """Whether this is the global batch's last micro-batch."""
        return self.share.last


_Shares = Iterator[tuple[Indices, Share]]
"""The samples to read, one where the share is empty, and the share."""


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
    """A user's DataLoader whose global batches are shared among the ranks."""

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
        """Check and plan the shares (*collective*). Floating-point tensors are cast to `dtype`, if given.

        `accumulate` and `micro_batch` are those of `BatchPlan.solve`; a loader that only `evaluates` has neither.
        Raises `RequestError`, on every rank, for loaders that cannot be shared, and where the ranks' data differ.
        """
        self.loader, self._world, self._seed = loader, world, seed
        self._trial = copy.copy(getattr(loader, "sampler", None))  # a sampler may count how often it is drawn
        self._drawn_epochs = 0

        def planned() -> tuple[BatchPlan, Indices | None]:
            size = _global_batch(loader)
            drawn = None if isinstance(loader.dataset, IterableDataset) or _is_known(loader.sampler) else self._try()
            if evaluates:  # a batch of which some rank has no sample is no reason to refuse
                return BatchPlan(global_size=size, ranks=world.size, accumulation=1), drawn
            return BatchPlan.solve(size, world.size, micro_size=micro_batch, accumulation=accumulate), drawn

        self.plan, self._drawn = world.together(planned)
        self.drop_last, self._is_stream = loader.drop_last, isinstance(loader.dataset, IterableDataset)
        self.counts_itself = self._drawn is not None and not np.array_equal(self._drawn, self._try())
        """Whether the sampler's order depends on how often it was drawn."""
        drawn = "" if self._drawn is None else digest(self._drawn)
        facts = {"global batch": self.plan.global_size, "samples": self.samples, "order of digest": drawn}
        check_alike(world, "The DataLoader", facts)
        self.workers = min(loader.num_workers, 1) if self._is_stream else loader.num_workers
        self._options: dict[str, Any] = {
            "begin": loader.worker_init_fn,
            "num_workers": self.workers,
            "pin_memory": loader.pin_memory and world.device.type == "cuda",
            **{name: getattr(loader, name) for name in ("timeout", "multiprocessing_context", "prefetch_factor")},
        }
        self._feed = Feed(Batches(loader.dataset, loader.collate_fn), stays=loader.persistent_workers, **self._options)
        self._how = (world.device, dtype, loader.pin_memory)
        # What a DataLoader makes lies on the CPU: `Tensor.to` would find nothing to do.
        self._moves = world.device.type != "cpu" or dtype is not None
        self._first: list[Signature | None] | None = None
        """Signatures of the samples to compare, once they are read; None for one that varies."""
        self.is_compared = world.group is None

    @property
    def cautions(self) -> list[str]:
        """What a resumed run, or one on other ranks, may not repeat."""
        lines, dataset = list[str](), self.loader.dataset
        if self.counts_itself:
            lines.append("the sampler's order depends on how often it was drawn: a resumed run draws it as often")
        if names := [name for name, value in state_of(dataset).items() if isinstance(value, _OWN_GENERATORS)]:
            lines.append(
                f"the data set has a random generator of its own ({', '.join(names)}): samples that draw from it "
                "depend on ranks and workers, and no checkpoint holds its state; draw from torch's, NumPy's or "
                "Python's global generator, which are seeded for each sample"
            )
        if hasattr(dataset, "state_dict"):
            lines.append(
                "the data set's state_dict is not used: a resumed run goes on at its step by the order of the samples, "
                "and reads the stream before it again"
                if self._is_stream
                else "the data set's state_dict is not used: a resumed run goes on at its step by the order of the "
                "samples"
            )
        return lines

    @property
    def order(self) -> str:
        """The order of an epoch's samples."""
        if self._is_stream or self._drawn is not None:
            return OF_A_SAMPLER
        return SHUFFLED if isinstance(self.loader.sampler, RandomSampler) else ASCENDING

    @property
    def _length(self) -> int | None:
        """Number of samples in an epoch that begins now: a data set may grow or shrink between epochs."""
        if self._drawn is not None:
            return len(self._drawn)
        counted: Any = self.loader.dataset if self._is_stream else self.loader.sampler
        return len(counted) if hasattr(counted, "__len__") else None  # a stream's own word, and no more

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch; None for a stream."""
        return None if self._is_stream else self._length

    @property
    def index_bound(self) -> int:
        """An exclusive upper bound of the sample indices; 0 for a stream."""
        dataset: Any = self.loader.dataset
        if self._drawn is None or not hasattr(dataset, "__len__"):
            return self.samples or 0
        return max(len(dataset), len(self._drawn))  # a sampler may choose some of the data set's samples

    def epoch_order(self, epoch: int, drawn_as: int | None = None) -> Callable[[int, int], Indices]:
        """Return the training order of `epoch`, as a function from [start, stop) to the samples there.

        `drawn_as` is another number for a further pass. Raises `RequestError` where a sampler changes its length.
        """
        samples, drawn_as = self._length or 0, epoch if drawn_as is None else drawn_as
        if self.order == SHUFFLED:
            return Order(samples, seed=self._seed, epoch=drawn_as).indices
        if self._drawn is None:
            return np.arange
        drawn = self._draw(self.loader.sampler, epoch, drawn_as)
        self._drawn_epochs = epoch + 1
        if len(drawn) != samples:
            raise RequestError(
                f"The DataLoader's sampler, a {type(self.loader.sampler).__name__}, yields {len(drawn)} samples in "
                f"epoch {epoch}, and {samples} in epoch 0; let it yield as many in each."
            )
        return lambda start, stop: drawn[start:stop]

    def steps(self) -> int | None:
        """Return the number of global batches per epoch. A stream's follows from its length; None without one."""
        length = self._length
        return None if length is None else self.plan.steps(length, drop_last=self.drop_last)

    def micros(self, epoch: int, *, first: int = 0, again: int = 0) -> Micros:
        """Yield this rank's training shares, from global batch `first`. Every rank gets as many.

        `again` counts earlier passes over the same epoch: each has an order and draws of its own. Raises
        `RequestError` where a sampler changes its length; errors of the user's own code pass through.
        """
        return self._micros(_TRAINING, epoch, first, again)

    def shares(self) -> Micros:
        """Yield this rank's evaluation shares. Each sample comes once, in ascending order.

        No batch is dropped, and no share is empty unless there are fewer samples than ranks.
        """
        return self._micros(_EVALUATION)

    def compare(self) -> str:
        """Compare the ranks' samples; return a warning or "" (*collective*). Does nothing until all ranks have read.

        Raises `RequestError`, on every rank, where their data sets have other samples.
        """
        if not all(self._world.gather(self._first is not None)):
            return ""
        self.is_compared = True
        return compare(self._world, "The DataLoader", self._first or [])

    def close(self) -> None:
        """End the workers and wait. Workers stuck in a sample are killed after seconds."""
        self._feed.close()

    def _micros(self, purpose: int, epoch: int = 0, first: int = 0, again: int = 0) -> Micros:
        drawn_as = epoch + (again << 32)
        keys = counter.keys(GENERATORS, self._seed, drawn_as, purpose)
        tasks: Iterator[Any] = iter(())
        if self._is_stream:
            spare = self._world.size if purpose == _EVALUATION else 0
            stream = Stream(self.loader, self.plan, self._world.rank, spare, keys, epoch, first)
            self._feed = Feed(stream, stays=False, **self._options)
        else:
            shares = self._training(epoch, first, drawn_as) if purpose == _TRAINING else self._evaluation()
            tasks = ((keys, *each) for each in shares)
            if self.samples and not self.is_compared and self._first is None:
                places = spread(self.samples)
                tasks = chain([(keys, places if self._drawn is None else self._drawn[places], None)], tasks)
        # Nothing here refers to a batch that was handed out: a session asks whether its user still has it.
        return Micros(filter(None, map(self._made, answers := self._feed.answers(keys, tasks))), answers)

    def _made(self, answer: tuple[Indices, Share | None, Any]) -> Micro | None:
        indices, share, batch = answer
        if share is None:
            self._first = self._first or batch
            return None
        return Micro(self._moved(batch), share, indices[: share.size])

    def _training(self, epoch: int, first: int, drawn_as: int) -> _Shares:
        samples, drop_last = self._length or 0, self.drop_last
        order = self.epoch_order(epoch, drawn_as)
        for share in self.plan.shares(samples, self._world.rank, first=first, drop_last=drop_last):
            yield order(share.start, share.stop), share

    def _evaluation(self) -> _Shares:
        ranks, rank, samples = self._world.size, self._world.rank, self._length or 0
        chosen = None if self._drawn is None else np.sort(self._drawn)
        batches = max(1, min(-(-samples // self.plan.global_size), samples // ranks)) if samples else 0
        for batch in range(batches):
            start, stop = (part * samples // batches for part in (batch, batch + 1))
            begin, end = (start + part * (stop - start) // ranks for part in (rank, rank + 1))
            read = np.arange(begin, end) if end > begin else np.array([start])
            size, total = end - begin, stop - start
            share = Share(int(read[0]), int(read[-1]) + 1, size, total, True, batch, 0, begin - start, total)
            yield read if chosen is None else chosen[read], share

    def catch_up(self, epochs: int) -> None:
        """Draw from a sampler that counts its own epochs as often as a run of `epochs` epochs has."""
        if self.counts_itself:
            for epoch in range(self._drawn_epochs, epochs):
                self._draw(self.loader.sampler, epoch, epoch)
            self._drawn_epochs = max(self._drawn_epochs, epochs)

    def _try(self) -> Indices:
        """Return the first epoch's indices of a copy of the sampler."""
        sampler = self._trial
        if not hasattr(sampler, "__len__"):  # as with those that never end
            raise RequestError(
                f"The DataLoader's sampler, a {type(sampler).__name__}, has no length; give it a __len__."
            )
        return self._draw(sampler, 0, 0)

    def _draw(self, sampler: Any, epoch: int, drawn_as: int) -> Indices:
        """Return the sampler's indices, equal on every rank. The global generators are seeded for it, and kept."""
        if set_epoch := getattr(sampler, "set_epoch", None):
            set_epoch(epoch)
        own = [each for each in getattr(sampler, "__dict__", {}).values() if isinstance(each, torch.Generator)]
        states = [generator.get_state() for generator in own]
        for number, generator in enumerate(own):
            generator.manual_seed(counter.key(self._seed, drawn_as, _SAMPLER, number))
        try:
            with preserve_generators():
                seed(counter.keys(GENERATORS, self._seed, drawn_as, _SAMPLER), 0)
                return np.array([operator.index(each) for each in sampler], np.int64)
        finally:
            for generator, state in zip(own, states, strict=True):  # the user may draw from it, too
                generator.set_state(state)

    def _moved(self, batch: Any) -> Any:
        return moved(batch, *self._how) if self._moves else batch


def moved(part: Any, *how: Any) -> Any:
    """Return `part` with its tensors moved. `how` is the device, a floating-point dtype or None, and non_blocking."""
    device, dtype, non_blocking = how
    if isinstance(part, Tensor):
        return part.to(device, dtype if part.is_floating_point() else None, non_blocking=non_blocking)
    if to := getattr(part, "to", None):
        part = to(device)
    if isinstance(part, MutableMapping):
        # Its class may have more to it than its items, as Hugging Face's BatchEncoding has.
        anew: Any = copy.copy(part)
        anew.update({key: moved(value, *how) for key, value in part.items()})
        return anew
    if to is None and isinstance(part, tuple | list):
        parts = [moved(each, *how) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    if to is None and dataclasses.is_dataclass(part) and not isinstance(part, type):
        anew = copy.copy(part)
        for field in dataclasses.fields(part):
            object.__setattr__(anew, field.name, moved(getattr(part, field.name), *how))  # though it is frozen
        return anew
    return part


def _global_batch(loader: Any) -> int:
    """Return the loader's batch size. Raises `RequestError` for loaders that cannot be shared."""
    if not isinstance(loader, DataLoader):
        raise RequestError(f"A {type(loader).__name__} cannot be shared out; give a torch DataLoader over the data.")
    if isinstance(loader.sampler, DistributedSampler):
        raise RequestError("The DataLoader has a DistributedSampler, which shares samples out again; leave it out.")
    if loader.batch_size is None:
        has = "a batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
        raise RequestError(f"The DataLoader has {has}; give the global batch as batch_size, with sampler or shuffle.")
    return loader.batch_size


def state_of(dataset: Any) -> dict[str, Any]:
    """Return the public attributes of a data set, and of the one that it is a part of, such as a Subset's."""
    inner = getattr(dataset, "dataset", None)
    held = {} if inner is None else state_of(inner)
    return held | {name: value for name, value in getattr(dataset, "__dict__", {}).items() if name != "dataset"}


def _is_known(sampler: Any) -> bool:
    """Return whether the sampler is sequential or a full shuffle. Such an order need not be drawn."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler
