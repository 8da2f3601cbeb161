"""Reading the samples of a user's DataLoader, the generators seeded for each of them.

torch's own DataLoader reads: one more, over the user's data set and with the user's options. It is given tasks: shares
of sample indices, or the next global batch of an iterable data set. Without workers there is nothing for it to do but
to ask the data set and to collate, which is done here.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from ..batching import BatchPlan
from ..randomness import Generators, kept
from . import counter
from .content import COMPARED, Signature, signature
from .loader import as_it_is, begin_worker
from .seeding import Drawing, seed_generators
from .source import Indices

_END: Any = object()


class Reader:
    """Reads the data set of `loader` as it does; workers stay between calls where it says so."""

    def __init__(self, loader: DataLoader[Any], plan: BatchPlan, rank: int, *, pin_memory: bool) -> None:
        self._user, self._plan, self._rank, self._pin_memory = loader, plan, rank, pin_memory
        self._queue, self._generator = _Queue(), torch.Generator()
        self._loader: DataLoader[Any] | None = None
        self._running: Any = None
        self._is_plain = _is_plain(loader.dataset)
        self._collates = loader.collate_fn is not default_collate
        self._dataset: Any = loader.dataset
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        is_left = self._is_stream or self._is_plain
        if not is_left and (_reads_batches(loader.dataset) or not loader.num_workers):
            # In workers others are left as they are: their own code there may look for its data set.
            self._dataset = _Batched(loader.dataset, Drawing(), collates=self._collates)

    def shares(self, shares: Iterator[Indices], keys: counter.UInt64) -> Iterator[Any]:
        """Yield what the user's collate function makes of each share; what it and the samples draw is keyed by `keys`.

        A share is not empty. Some are taken ahead of time where there are workers.
        """
        if self._collates or not self._is_plain:
            batches = self.answers((_Seeded(keys, share, self._is_plain) for share in shares), keys)
            return _apart(batches) if self._collates and not self._user.num_workers else batches
        if type(self._user.dataset) is TensorDataset and not self._user.num_workers:
            return self._taken(self._user.dataset.tensors, shares)
        return self.answers((share.tolist() for share in shares), keys)

    def _taken(self, tensors: Sequence[Tensor], shares: Iterator[Indices]) -> Iterator[list[Tensor]]:
        """Yield what torch would collate of each share, taken at once: sample by sample costs more than a small net."""
        for share in shares:
            taken = [each.index_select(0, torch.from_numpy(share)) for each in tensors]
            yield [each.pin_memory() for each in taken] if self._pin_memory else taken

    def answers(self, tasks: Iterator[Any], keys: counter.UInt64) -> Iterator[Any]:
        """Yield what is read for each task."""
        if not (self._user.num_workers or self._pin_memory or self._is_stream):
            yield from map(self._read, tasks)  # not as a generator: what ends is told by who counts
            return
        self._queue.tasks = tasks
        # What torch seeds workers with: no history of this process, and nothing drawn from its generators.
        self._generator.manual_seed(int(keys[0]) >> 1)
        if self._loader is None:
            self._loader = self._made()
            with warnings.catch_warnings():  # the user's own DataLoader has given it
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                batches = iter(self._loader)
        else:
            batches = iter(self._loader)
        self._running = batches
        for worker in getattr(batches, "_workers", ()):
            # torch, and Python at its exit, end a worker that does not end by itself with SIGTERM, which it ignores.
            worker._popen.terminate = worker._popen.kill
        try:
            yield from batches
        finally:
            if not self._user.persistent_workers:
                self.close()

    def close(self) -> None:
        """End the workers and wait for them; those that are stuck in a sample are killed after seconds."""
        # torch has no public way to say this, and the trace of an exception would keep them.
        if end := getattr(self._running, "_shutdown_workers", None):
            end()
        self._running = self._loader = None

    def _read(self, task: Any) -> Any:
        dataset = self._dataset
        samples = dataset.__getitems__(task) if _reads_batches(dataset) else [dataset[index] for index in task]
        return self._user.collate_fn(samples)

    def _made(self) -> DataLoader[Any]:
        user = self._user
        dataset: Any = self._dataset
        options: dict[str, Any] = {
            "num_workers": user.num_workers,
            "pin_memory": self._pin_memory,
            "timeout": user.timeout,
            "worker_init_fn": partial(_begin, user.worker_init_fn),
            "multiprocessing_context": user.multiprocessing_context,
            "prefetch_factor": user.prefetch_factor,
            "persistent_workers": user.persistent_workers,
            "generator": self._generator,
        }
        if self._is_stream:
            dataset = _Stream(dataset, user.collate_fn, user.drop_last, self._plan, self._rank)
            options |= {"num_workers": min(user.num_workers, 1), "collate_fn": as_it_is}
            return DataLoader(dataset, batch_size=None, sampler=self._queue, **options)
        return DataLoader(dataset, batch_sampler=self._queue, collate_fn=user.collate_fn, **options)


class _Queue:
    """The sampler that the DataLoader sees: the tasks that were given last."""

    tasks: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.tasks


@dataclass(frozen=True)
class _Seeded:
    """The samples of a share to read: taking the next one seeds the generators for it, and at the end for collating.

    torch reads `[dataset[index] for index in these]`, so that the data set in its workers is the user's own.
    """

    keys: counter.UInt64
    indices: Indices
    collate_only: bool

    def __iter__(self) -> Iterator[int]:
        if self.collate_only:
            yield from self.indices.tolist()
        else:
            for own, index in zip(counter.bits(self.keys, self.indices).T, self.indices.tolist(), strict=True):
                seed_generators(own)
                yield index
        self.seed_for_collating()

    def seed_for_collating(self) -> None:
        seed(self.keys, ~int(self.indices[0]))  # no sample's index is negative


class _Batched:
    """A data set as it reads a whole batch: sample by sample, each seeded for, from the first batch on that draws."""

    def __init__(self, dataset: Any, drawing: Drawing, *, collates: bool) -> None:
        """`collates` tells whether code of the user's makes batches, which may draw too."""
        self._dataset, self._drawing, self._collates = dataset, drawing, collates
        self._plain = dataset.__getitems__ if _reads_batches(dataset) else self._one_by_one

    def __getitems__(self, share: _Seeded) -> Any:
        found = self._drawing.read(
            lambda: self._plain(share.indices.tolist()),
            lambda: self._one_by_one(share),
        )
        if self._collates:
            share.seed_for_collating()
        return found

    def _one_by_one(self, indices: Iterable[int]) -> list[Any]:
        return [self._dataset[index] for index in indices]


class Part(NamedTuple):
    """The task of reading one global batch of an iterable data set."""

    keys: counter.UInt64
    epoch: int
    step: int
    begins: bool
    """Whether the stream begins anew; the batches before `step` are skipped."""
    evaluates: bool


@dataclass
class _Stream:
    """An iterable data set, of which each task reads a global batch; the answer is this rank's shares of it.

    It draws from generators of its own, which go on from batch to batch: what it draws is the same on all ranks.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    drop_last: bool
    plan: BatchPlan
    rank: int
    samples: Iterator[Any] = field(default_factory=lambda: iter(()))
    held: tuple[Any, ...] = ()
    """Samples that were read, and belong to later batches."""
    generators: Generators | None = None
    first: list[Signature] = field(default_factory=list)
    """What the first samples are, where there are ranks to compare."""

    def __getitem__(self, part: Part) -> tuple[list[tuple[Any, int, int]], int, list[Signature]] | None:
        """Return [(batch, start, stop) of each share], the samples of the whole batch, and `first`; None at the end."""
        position = part.step * self.plan.global_size
        with kept():
            samples = self._next(part)
            total = len(samples)
            if self.plan.ranks > 1 and not self.first:
                self.first = [signature(sample) for sample in samples[:COMPARED]]
            if not total or (self.drop_last and not part.evaluates and total < self.plan.global_size):
                return None
            shares = [(share.start, share.stop) for share in self.plan.split(0, total, self.rank)]
            if part.evaluates:
                shares = [even(total, self.plan.ranks, self.rank)]
            answer = []
            for start, stop in shares:
                seed(part.keys, ~(position + start))
                answer.append((self.collate(samples[start:stop] or samples[:1]), start, stop))
        return answer, total, self.first

    def _next(self, part: Part) -> list[Any]:
        """Return the samples of the next global batch."""
        size = self.plan.global_size
        if part.begins:
            if set_epoch := getattr(self.dataset, "set_epoch", None):
                set_epoch(part.epoch)
            seed(part.keys, 0)
            self.samples, self.held = iter(self.dataset), ()
            deque(islice(self.samples, part.step * size), maxlen=0)
        elif self.generators:
            self.generators.put_back(())
        # In evaluation, a rest of fewer samples than ranks joins the batch before it.
        wanted = size + (self.plan.ranks if part.evaluates else 0)
        found = [*self.held, *islice(self.samples, wanted - len(self.held))]
        self.generators = Generators.now(())
        whole = size if len(found) == wanted else len(found)
        self.held = tuple(found[whole:])
        return found[:whole]


def seed(keys: counter.UInt64, number: int) -> None:
    """Seed the generators for the sample, or whatever else, of that number."""
    seed_generators(counter.bits(keys, np.array([number])).T[0])


def even(samples: int, parts: int, part: int) -> tuple[int, int]:
    """Return [start, stop) of part `part` of `samples` cut into nearly even `parts`, none empty where it can be."""
    return part * samples // parts, (part + 1) * samples // parts


def _apart(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches; what is drawn for one in this process leaves no trace in its generators."""
    while True:
        with kept():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def _is_plain(dataset: Any) -> bool:
    """Return whether reading a sample runs nothing of the user's, and so draws nothing."""
    if type(dataset) is ConcatDataset:
        return all(map(_is_plain, dataset.datasets))
    return type(dataset) is TensorDataset or (type(dataset) is Subset and _is_plain(dataset.dataset))


def _reads_batches(dataset: Any) -> bool:
    while isinstance(dataset, Subset):  # which has `__getitems__` for one that has
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _begin(own: Callable[[int], None] | None, worker: int) -> None:
    begin_worker(worker)
    if own is not None:
        own(worker)
