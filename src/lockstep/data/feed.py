"""Samples read while training goes on: torch's DataLoader and its workers, the generators seeded for each sample.

A `Feed` gives a DataLoader tasks in place of indices: answers come back in order, and workers stay from epoch to epoch.
What a sample draws from torch's, Python's and NumPy's global generators follows from (seed, epoch, sample index) alone,
whichever rank or worker reads it, and leaves no trace in the generators of this process, from which the model's own
randomness comes. A generator that a data set keeps for itself is beyond reach.

Seeding three generators takes 15 µs, longer than a small sample. Most data sets draw nothing: until one does, batches
are read unseeded, and whether one has drawn is looked at afterwards; it is then read again.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import connection
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from ..batching import BatchPlan
from ..monitor.signals import SIGNALS
from ..world.random_state import Generators, kept
from . import counter
from .alike import COMPARED, Signature, signature
from .source import Indices

T = TypeVar("T")
GENERATORS = 3
"""Each gets bits of its own: torch's and NumPy's are of one kind, and would draw alike from the same seed."""
_WATCH_S = 1.0
"""How often a worker looks whether its rank still lives."""
_ENDING_S = 5.0
"""How long the system may take to end a worker that no longer answers."""
_END: Any = object()


class Feed:
    """A DataLoader over `dataset` that is given its tasks; `options` are its own.

    A task is an index of the data set, or with `batched` the indices of a batch. Workers stay between calls of
    `answers` where it `stays`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        stays: bool,
        batched: bool = False,
        begin: Callable[[int], None] | None = None,
        **options: Any,
    ) -> None:
        self._dataset, self._stays, self._batched, self._begin = dataset, stays, batched, begin
        self._options = options
        self._queue, self._generator = _Queue(), torch.Generator()
        self._loader: DataLoader[Any] | None = None
        self._running: Any = None
        # Once, here: each worker would look for the place by writing a file there, which one that is killed leaves.
        tempfile.gettempdir()

    def answers(self, tasks: Iterator[Any], seed: int = 0) -> Iterator[Any]:
        """Yield what is read for each task; `seed` is what torch seeds workers with."""
        workers = self._options["num_workers"]
        if not (workers or self._batched or self._options.get("pin_memory")):
            # A DataLoader without workers costs more than a small net's forward pass.
            yield from map(self._dataset.__getitem__, tasks)
            return
        self._queue.tasks = tasks
        # A generator of its own: else each epoch would advance torch's, and with it dropout.
        self._generator.manual_seed(seed)
        if self._loader is None:
            self._loader = self._made()
        # Workers are born with signals held back, until they have said how they take them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._running = batches = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for worker in getattr(batches, "_workers", ()):
            # torch, and Python at its exit, end a worker that does not end by itself with SIGTERM, which it ignores.
            worker._popen.terminate = worker._popen.kill
        try:
            yield from batches
        finally:
            if not self._stays:
                self.close()

    def _made(self) -> DataLoader[Any]:
        given: dict[str, Any] = {"batch_size": None, "sampler": self._queue, "collate_fn": as_it_is}
        if self._batched:
            given = {"batch_sampler": self._queue}
        with warnings.catch_warnings():  # more workers than processors may well be what somebody asks for
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return DataLoader(
                self._dataset,
                **given | self._options,
                generator=self._generator,
                worker_init_fn=partial(begin_worker, self._begin),
                persistent_workers=self._stays and self._options["num_workers"] > 0,
            )

    def raise_death(self, error: Exception) -> NoReturn:
        """Raise what torch does for a worker that has ended, or `error`, which came where one ended as it sent."""
        workers = {worker.sentinel: worker.pid for worker in getattr(self._running, "_workers", ())}
        for ended in connection.wait(list(workers), timeout=_ENDING_S):
            raise RuntimeError(f"DataLoader worker (pid(s) {workers[ended]}) exited unexpectedly") from error
        raise error

    def close(self) -> None:
        """End the workers and wait for them; those that are stuck in a sample are killed after seconds."""
        # torch has no public way to say this, and the trace of an exception would keep them.
        if end := getattr(self._running, "_shutdown_workers", None):
            end()
        self._running = self._loader = None


class _Queue:
    """The sampler that the DataLoader sees: the tasks that were given last."""

    tasks: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.tasks


def as_it_is(answer: Any) -> Any:
    """Return what a worker has made: the collate function of a DataLoader whose samples are batches already."""
    return answer


def begin_worker(own: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a data worker: signals are its rank's to answer, and it ends with its rank.

    `own` is the user's `worker_init_fn`.
    """
    # Ctrl-C reaches every process of the terminal, and SIGTERM every process of a group where torchrun or a scheduler
    # sends it; the rank needs its workers to finish the step and save.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            # Not ignored: what the data set starts would ignore them too, and could not be ended.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # torch's workers look for their parent between two tasks; one that is stuck in a sample would outlive it.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="rank watch").start()
    if own is not None:
        own(worker)


def _end_with(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_WATCH_S)
    os._exit(1)


# --- what samples draw


def seed(keys: counter.UInt64, number: int) -> None:
    """Seed the generators for the sample, or whatever else, of that number; `keys` are `GENERATORS` of `counter`'s."""
    _seed(counter.bits(keys, np.array([number])).T[0])


def _seed(bits: counter.UInt64) -> None:
    """Seed torch's generator (the CPU's), Python's and NumPy's from `bits` (3,)."""
    for_torch, for_python, for_numpy = bits.tolist()
    # Not torch.manual_seed, which seeds every GPU's too; those are not given back, and it takes 100 times as long.
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_python)
    np.random.seed(for_numpy >> 32)  # it takes 32 bits


@dataclass(frozen=True)
class Seeded:
    """Samples to read: taking the next index seeds the generators for it, and the end of them seeds for collating.

    torch reads `[dataset[index] for index in these]`, so that the data set in its workers is the user's own.
    """

    keys: counter.UInt64
    indices: Indices
    collate_only: bool = False

    def __iter__(self) -> Iterator[int]:
        if self.collate_only:
            yield from self.indices.tolist()
        else:
            for own, index in zip(counter.bits(self.keys, self.indices).T, self.indices.tolist(), strict=True):
                _seed(own)
                yield index
        self.seed_for_collating()

    def seed_for_collating(self) -> None:
        """Seed for what makes a batch of these."""
        if len(self.indices):
            seed(self.keys, ~int(self.indices[0]))  # no sample's index is negative


class Drawing:
    """Whether a data set draws from the generators at all, as far as is known."""

    def __init__(self) -> None:
        self.is_seen = False
        self._before: Generators | None = None

    def read(self, read: Callable[[Iterable[int]], T], share: Seeded) -> T:
        """Return `read` of the share's indices: of a data set that draws, seeded for each of them.

        The process's generators are left as they were.
        """
        self._before = before = Generators.now((), self._before)
        if not self.is_seen:
            found = read(share.indices.tolist())
            if before.is_now():
                return found
            self.is_seen = True
        try:
            return read(share)
        finally:
            before.put_back(())


# --- the samples of a user's DataLoader


class Reader:
    """Reads the data set of `loader` as it does; workers stay between calls where it says so."""

    def __init__(self, loader: DataLoader[Any], plan: BatchPlan, rank: int, *, pin_memory: bool) -> None:
        self._user, self._pin_memory = loader, pin_memory
        dataset: Any = loader.dataset
        self._is_plain = _is_plain(dataset)
        self._collates = loader.collate_fn is not default_collate
        options: dict[str, Any] = {"num_workers": loader.num_workers}
        is_stream = isinstance(dataset, IterableDataset)
        if is_stream:
            dataset = _Stream(dataset, loader.collate_fn, loader.drop_last, plan, rank)
            options["num_workers"] = min(loader.num_workers, 1)
        else:
            options["collate_fn"] = loader.collate_fn
            if not self._is_plain and (_reads_batches(dataset) or not loader.num_workers):
                # In workers others are left as they are: their own code there may look for its data set.
                dataset = _Batched(dataset, collates=self._collates)
        self._feed = Feed(
            dataset,
            stays=loader.persistent_workers,
            batched=not is_stream,
            begin=loader.worker_init_fn,
            pin_memory=pin_memory,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            **options,
        )

    def shares(self, shares: Iterator[Indices], keys: counter.UInt64) -> Iterator[Any]:
        """Yield what the user's collate function makes of each share; what it and the samples draw is keyed by `keys`.

        A share is not empty. Some are taken ahead of time where there are workers.
        """
        if self._collates or not self._is_plain:
            batches = self.answers((Seeded(keys, share, self._is_plain) for share in shares), keys)
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
        return self._feed.answers(tasks, int(keys[0]) >> 1)

    def close(self) -> None:
        """End the workers and wait for them; those that are stuck in a sample are killed after seconds."""
        self._feed.close()


class _Batched:
    """A data set as it reads a whole batch: sample by sample, each seeded for, from the first batch on that draws."""

    def __init__(self, dataset: Any, *, collates: bool) -> None:
        """`collates` tells whether code of the user's makes batches, which may draw too."""
        self._dataset, self._drawing, self._collates = dataset, Drawing(), collates
        self._at_once = dataset.__getitems__ if _reads_batches(dataset) else None

    def __getitems__(self, share: Seeded) -> Any:
        found = self._drawing.read(self._read, share)
        if self._collates:
            share.seed_for_collating()
        return found

    def _read(self, indices: Iterable[int]) -> Any:
        if self._at_once is not None and isinstance(indices, list):
            return self._at_once(indices)
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
