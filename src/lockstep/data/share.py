"""This rank's share of a DataLoader that the user made.

The order and the samples' own randomness are functions of (seed, epoch, sample index), so that a global batch is the
same samples, with the same variations, on any number of ranks and workers. What a collate function draws is a function
of (seed, epoch, first sample of the share): reproducible, but another one where the shares are others, like dropout.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from ..batching import BatchPlan
from ..errors import RequestError
from ..world.random_state import kept
from ..world.world import World
from . import counter
from .alike import COMPARED, Signature, check_alike, compare, digest, signature, stable
from .feed import GENERATORS, Part, Reader, even, seed
from .order import ASCENDING, OF_A_SAMPLER, SHUFFLED, Order
from .source import Indices

_TRAINING, _EVALUATION, _SAMPLER = 6, 7, 8
"""Keep the draws of each purpose apart from each other, and from those of the other data sets."""
_Asked = tuple[Indices, int, int, bool]
"""The samples to read, (1,) that stand in where the share is empty, and `Micro`'s size, total and last."""
_ENDED = "the data set, or its collate function, raised StopIteration"


class Micro(NamedTuple):
    """This rank's share of one global micro-batch."""

    batch: Any
    """What the user's collate function made of it, on the device."""
    size: int
    """This rank's samples in it; 0 where the share is empty and `batch` stands in: the global batch's first sample."""
    total: int
    """Samples of the whole global batch, of all ranks and micro-batches."""
    last: bool
    """Whether it is the last micro-batch of its global batch."""
    indices: Indices
    """(size,) which samples; of an iterable data set, their positions in this epoch's stream."""


class SharedLoader:
    """A user's DataLoader, whose batches are the global ones, shared out among the ranks."""

    stands_in = True
    """Whether a sample that does not count stands in where a share is empty."""

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
        """Check what can be shared out (*collective*).

        `accumulate` and `micro_batch` are those of `BatchPlan.solve`; a loader that only `evaluates` has no batch that
        every rank needs a sample of. Floating-point tensors are cast to `dtype` where one is given. Raises
        `RequestError`, on every rank, for what cannot be shared out, and where the ranks' data sets are not alike.
        """
        self.loader = loader
        self._world, self._seed = world, seed
        check_alike(world, "The DataLoader", world.together(lambda: self._prepare(accumulate, micro_batch, evaluates)))
        self._how = (world.device, dtype, loader.pin_memory)
        # What a DataLoader makes lies on the CPU: `Tensor.to` would find nothing to do.
        self._moves = world.device.type != "cpu" or dtype is not None
        pin_memory = loader.pin_memory and world.device.type == "cuda"
        self._reader = Reader(loader, self.plan, world.rank, pin_memory=pin_memory)
        self._first: list[Signature | None] | None = None
        """What the samples to compare are, once they are read; None for one that is another each time."""
        self.is_compared = world.group is None

    def _prepare(self, accumulate: int | None, micro_batch: int | None, evaluates: bool) -> dict[str, Any]:
        """Set what the loader says of itself, and return what has to be the same on every rank."""
        size = _global_batch(self.loader)
        dataset, sampler = self.loader.dataset, self.loader.sampler
        ranks = self._world.size
        if evaluates:
            self.plan = BatchPlan(global_size=size, ranks=ranks, accumulation=1)
        else:
            self.plan = BatchPlan.solve(size, ranks, micro_size=micro_batch, accumulation=accumulate)
        self.drop_last = self.loader.drop_last
        self._is_stream = isinstance(dataset, IterableDataset)
        self._is_drawn = not (self._is_stream or _is_known(sampler))
        drawn = self._draw(0) if self._is_drawn else np.empty(0, np.int64)
        counted: Any = dataset if self._is_stream else drawn if self._is_drawn else sampler
        self._length = len(counted) if hasattr(counted, "__len__") else None  # a stream's own word, and no more
        self.samples = None if self._is_stream else self._length
        places = np.unique(np.linspace(0, max(0, (self.samples or 0) - 1), COMPARED).astype(np.int64))
        self._chosen: Indices = (drawn[places] if self._is_drawn else places) if self.samples else drawn[:0]
        return {"global batch": size, "samples": self._length, "order of digest": digest(drawn)}

    @property
    def order(self) -> str:
        """In which order an epoch visits the samples."""
        if self._is_drawn or self._is_stream:
            return OF_A_SAMPLER
        return SHUFFLED if isinstance(self.loader.sampler, RandomSampler) else ASCENDING

    def steps(self) -> int | None:
        """Return the global batches of an epoch; of an iterable data set what its length says, None without one."""
        return None if self._length is None else self.plan.steps(self._length, drop_last=self.drop_last)

    def micros(self, epoch: int, *, first: int = 0) -> Generator[Micro, None, None]:
        """Yield this rank's shares of the epoch, from global batch `first` on, to train on.

        Every rank gets as many. Raises `RequestError` where a sampler yields another number of samples than before;
        what the user's data set or collate function raises passes through.
        """
        if self._is_stream:
            return self._stream(_TRAINING, epoch, first)
        return self._read(self._training(epoch, first), _TRAINING, epoch)

    def shares(self) -> Generator[Micro, None, None]:
        """Yield this rank's shares of each sample once, in the data set's order, to evaluate on.

        The loader's last batch is never dropped, and its order is put aside: of a sampler, the indices alone are
        taken, in ascending order. No rank's share is empty unless there are fewer samples than ranks.
        """
        if self._is_stream:
            return self._stream(_EVALUATION, 0, 0)
        return self._read(self._evaluation(), _EVALUATION, 0)

    def compare(self) -> str:
        """Compare what the ranks have read, if all have; return a warning, "" for none (*collective*).

        Raises `RequestError`, on every rank, where their data sets have other samples.
        """
        if not all(self._world.gather(self._first is not None)):
            return ""
        self.is_compared = True
        return compare(self._world, "The DataLoader", self._first or [])

    def close(self) -> None:
        """End the workers and wait for them; those that are stuck in a sample are killed after seconds."""
        self._reader.close()

    def _training(self, epoch: int, first: int) -> Iterator[_Asked]:
        samples = self._length or 0
        order = self._order(epoch, samples)
        for start, stop, total, last in self.plan.shares(
            samples, self._world.rank, first=first, drop_last=self.drop_last
        ):
            size = stop - start
            if not size:  # the batch's first stands in
                start -= start % self.plan.global_size
            yield order(start, start + (size or 1)), size, total, last

    def _evaluation(self) -> Iterator[_Asked]:
        ranks, rank, samples = self._world.size, self._world.rank, self._length or 0
        chosen = np.sort(self._draw(0)) if self._is_drawn else None
        batches = max(1, min(-(-samples // self.plan.global_size), samples // ranks)) if samples else 0
        for batch in range(batches):
            start, stop = even(samples, batches, batch)
            begin, end = (start + place for place in even(stop - start, ranks, rank))
            read = np.arange(begin, end) if end > begin else np.array([start])
            yield read if chosen is None else chosen[read], end - begin, stop - start, True

    def _order(self, epoch: int, samples: int) -> Callable[[int, int], Indices]:
        """Return what gives the samples at positions [start, stop) of the epoch's order."""
        sampler = self.loader.sampler
        if not self._is_drawn:
            shuffled = self.order == SHUFFLED
            return Order(samples, seed=self._seed, epoch=epoch).indices if shuffled else np.arange
        drawn = self._draw(epoch)
        if len(drawn) != samples:
            raise RequestError(
                f"The DataLoader's sampler, a {type(sampler).__name__}, yields {len(drawn)} samples in epoch {epoch}, "
                f"and {samples} in epoch 0; let it yield as many in each."
            )
        return lambda start, stop: drawn[start:stop]

    def _draw(self, epoch: int) -> Indices:
        """Return what the user's sampler yields, the same on every rank and whatever was drawn before."""
        sampler = self.loader.sampler
        if not hasattr(sampler, "__len__"):  # as with those that never end
            raise RequestError(
                f"The DataLoader's sampler, a {type(sampler).__name__}, has no length; give it a __len__, the number "
                "of samples that it yields in an epoch."
            )
        if set_epoch := getattr(sampler, "set_epoch", None):
            set_epoch(epoch)
        held = [
            (own, own.get_state())
            for own in getattr(sampler, "__dict__", {}).values()
            if isinstance(own, torch.Generator)
        ]
        with kept():
            seed(counter.keys(GENERATORS, self._seed, epoch, _SAMPLER), 0)
            for number, (own, _) in enumerate(held):
                own.manual_seed(counter.key(self._seed, epoch, _SAMPLER, number))
            yielded = list(sampler)
        for own, state in held:
            own.set_state(state)
        try:
            return np.fromiter(map(operator.index, yielded), np.int64, len(yielded))
        except TypeError as error:
            raise RequestError(
                f"The DataLoader's sampler, a {type(sampler).__name__}, yields what is no index ({error}); let it "
                "yield whole numbers."
            ) from error

    def _read(self, asked: Iterable[_Asked], purpose: int, epoch: int) -> Generator[Micro, None, None]:
        ahead: deque[_Asked] = deque()
        compared = [] if self.is_compared or self._first is not None else self._to_compare()

        def shares() -> Iterator[Indices]:
            yield from compared
            for each in asked:
                ahead.append(each)
                yield each[0]

        moves, readings = self._moves, list[Signature]()
        for batch in self._told(self._reader.shares(shares(), counter.keys(GENERATORS, self._seed, epoch, purpose))):
            if len(readings) < len(compared):
                readings.append(signature(batch))
                if len(readings) == len(compared):
                    count = len(self._chosen)
                    self._first = [stable(readings[number::count]) for number in range(count)]
                continue
            read, size, total, last = ahead.popleft()
            if moves:
                batch = moved(batch, *self._how)
            yield Micro(batch, size, total, last, read if size else read[:0])
        if ahead or len(readings) < len(compared):
            raise RuntimeError(_ENDED)

    def _to_compare(self) -> list[Indices]:
        """Return what to read first: some samples, time and again, the last time by the worker that was the first."""
        once = [self._chosen[number : number + 1] for number in range(len(self._chosen))]
        return once * (1 + max(1, self.loader.num_workers))

    def _told(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except IndexError as error:
            error.add_note(f"the data set's length is {self._length}: its __len__ may promise more than it holds")
            raise

    def _stream(self, purpose: int, epoch: int, first: int) -> Generator[Micro, None, None]:
        keys, position = counter.keys(GENERATORS, self._seed, epoch, purpose), first * self.plan.global_size
        parts = (Part(keys, epoch, step, step == first, purpose == _EVALUATION) for step in count(first))
        for answer in self._reader.answers(parts, keys):
            if answer is None:
                return
            shares, total, first_samples = answer
            self._first = self._first or first_samples
            for number, (batch, start, stop) in enumerate(shares, start=1):
                indices = np.arange(position + start, position + stop)
                batch = moved(batch, *self._how) if self._moves else batch
                yield Micro(batch, stop - start, total, number == len(shares), indices)
            position += total
        raise RuntimeError(_ENDED)


def moved(part: Any, *how: Any) -> Any:
    """Return `part` with its tensors moved as `how` says: the device, a floating-point type or None, non_blocking."""
    device, dtype, non_blocking = how
    if isinstance(part, Tensor):
        return part.to(device, dtype if part.is_floating_point() else None, non_blocking=non_blocking)
    if to := getattr(part, "to", None):
        part = to(device)
        if not isinstance(part, MutableMapping):
            return part
    if isinstance(part, MutableMapping):
        # Its class may have more to it than its items, as Hugging Face's BatchEncoding has.
        anew: Any = copy.copy(part)
        anew.update({key: moved(value, *how) for key, value in part.items()})
        return anew
    if isinstance(part, tuple | list):
        parts = [moved(each, *how) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    if dataclasses.is_dataclass(part):
        anew = copy.copy(part)
        for field in dataclasses.fields(part):
            object.__setattr__(anew, field.name, moved(getattr(part, field.name), *how))
        return anew
    return part


def _global_batch(loader: Any) -> int:
    """Return the loader's batch size. Raises `RequestError` for what is not shared out."""
    if not isinstance(loader, DataLoader):
        raise RequestError(f"A {type(loader).__name__} cannot be shared out; give a torch DataLoader over the data.")
    if isinstance(loader.sampler, DistributedSampler):
        raise RequestError(
            "The DataLoader has a DistributedSampler, which shares samples out a second time; leave it out, and give "
            "the global batch as batch_size."
        )
    if loader.batch_size is None:
        has = "a batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
        raise RequestError(f"The DataLoader has {has}; give the global batch as batch_size, with sampler or shuffle.")
    return loader.batch_size


def _is_known(sampler: Any) -> bool:
    """Return whether the order is the data set's, or a shuffling of all of it, which need not be drawn."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler
