"""Samples read during training, by torch's DataLoader and its workers.

What a sample draws from torch's, Python's and NumPy's global generators follows from (seed, epoch, sample index) alone,
and leaves no trace in those of this process. Seeding them takes 15 µs, longer than reading a small sample, and most
data sets draw nothing: until the first draw, batches are read unseeded; the batch that has drawn is read again. To see
that nothing was drawn takes 0.1 ms per batch.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate, get_worker_info

from .. import _torch, user_code
from ..batching import BatchPlan
from ..errors import LockstepError, RunError, counted
from ..monitor.failures import one_line, place
from ..monitor.signals import SIGNALS
from ..world.random_state import Generators, kept
from . import counter
from .ranks import COMPARED, Signature, alike, signature
from .source import Indices

GENERATORS = 3
"""Each gets keys of its own: torch's and NumPy's are of one kind, and would draw alike from the same seed."""
_WATCH_S = 1.0


class Name(str):
    """Data set name, module:attribute. A worker that was not forked imports the module when unpickling."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (str(self),)


def _imported(name: str) -> Name:
    if ":" in name:
        user_code.load("--data", name)
    return Name(name)


class Batches:
    """Batches of a map-style data set. A task (keys, indices, note) gives (indices, note, batch).

    Without a note, the answer has the samples' signatures. For a data set that `--data` names, a sample's error is one
    sentence, instead of a trace through three processes. `check` is given (index, sample) of a batch's first one, and
    of each where the batch cannot be collated: checking each sample takes as long as reading it.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] = default_collate,
        name: str = "",
        split: str = "",
        check: Callable[[int, Any], object] | None = None,
    ) -> None:
        self._name = Name(name)  # before `dataset`, since its class is found in that module
        self.dataset, self._split, self._check = dataset, split, check
        self._collate = collated if collate is default_collate else collate
        self._draws = False

    def __getitem__(self, task: tuple[counter.UInt64, Indices, Any]) -> tuple[Indices, Any, Any]:
        """Return the collated batch, or a `LockstepError`. Torch would put a trace into a raised one."""
        keys, indices, note = task
        try:
            return indices, note, self.signatures(keys, indices) if note is None else self._read(keys, indices)
        except LockstepError as error:
            if not self._name:
                raise
            return indices, note, error
        except StopIteration as error:  # uncaught, it would end the epoch silently
            raise RuntimeError("the data set, or its collate function, raised StopIteration") from error

    def signatures(self, keys: counter.UInt64, indices: Indices) -> list[Signature | None]:
        """Return the samples' signatures. None for a sample that differs between two readings."""
        pairs = ([signature(self._sample(keys, indices[[at]])) for _ in range(2)] for at in range(len(indices)))
        return [first if alike(first, second) else None for first, second in pairs]

    def _sample(self, keys: counter.UInt64, index: Indices) -> Any:
        """Return the sample at `index` (1,), as the data set gives it: a user's collate may need more than one."""
        with kept():
            at_once = getattr(self.dataset, "__getitems__", None)
            seed(keys, int(index[0]))
            return at_once(index.tolist())[0] if at_once else self._samples(index.tolist())[0]

    def _read(self, keys: counter.UInt64, indices: Indices) -> Any:
        dataset = self.dataset
        if type(dataset) is TensorDataset and self._collate is collated:
            # Sample by sample costs more than a small net's step.
            at = torch.from_numpy(indices)
            return [each.index_select(0, at.to(each.device)) for each in dataset.tensors]
        before = Generators.now(())
        if not self._draws:
            at_once, these = None if self._name else getattr(dataset, "__getitems__", None), indices.tolist()
            batch = self._together(indices, at_once(these) if at_once else self._samples(these))
            if before.is_now():
                return batch
            self._draws = True
        try:
            samples = self._samples(_seeded(keys, indices))
            seed(keys, ~int(indices[0]))  # for the collate function; no sample's index is negative
            return self._together(indices, samples)
        finally:
            before.put_back(())

    def _samples(self, indices: Iterable[int]) -> list[Any]:
        samples, index = [], 0
        try:
            for index in indices:
                samples.append(self.dataset[index])
        except Exception as error:
            if not self._name or isinstance(error, LockstepError):
                raise
            where = f"{self._split} sample {index} of --data {self._name},{place(error)}"
            raise RunError(
                f"The data set failed at {where}: {one_line(error)}", trace=traceback.format_exc()
            ) from error
        return samples

    def _together(self, indices: Indices, samples: list[Any]) -> Any:
        check = self._check
        try:
            batch = self._collate(samples)
            if check is not None:
                check(int(indices[0]), samples[0])
            return batch
        except Exception as error:
            if check is not None:
                for index, sample in zip(indices.tolist(), samples, strict=True):
                    check(index, sample)
            if get_worker_info() is None:  # torch passes a worker's error on as text
                error.add_note(f"collating {counted(len(samples), 'sample')}, this rank's share of a global batch")
            raise


class Stream(IterableDataset[Any]):
    """One rank's shares of an iterable data set's epoch. Every rank reads the whole set; shares begin at batch `first`.

    Answers are as those of `Batches`; the first one has the first samples' signatures. Where `spare` is the number of
    ranks and not 0, a rest of fewer samples than ranks joins the previous batch, so that no share is empty.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: BatchPlan,
        rank: int,
        spare: int,
        keys: counter.UInt64,
        epoch: int,
        first: int,
    ) -> None:
        self.dataset, self._collate, self._drop_last = loader.dataset, loader.collate_fn, loader.drop_last and not spare
        self._size, self._plan = plan.global_size, dataclasses.replace(plan, global_size=plan.global_size + spare)
        self._rank, self._keys, self._epoch, self._first = rank, keys, epoch, first

    def __iter__(self) -> Iterator[tuple[Indices, Any, Any]]:
        size, most, held = self._size, self._plan.global_size, list[Any]()
        with kept():
            if set_epoch := getattr(self.dataset, "set_epoch", None):
                set_epoch(self._epoch)
            seed(self._keys, 0)
            samples = self._read(iter(self.dataset))
        for step in count():
            answers: list[tuple[Indices, Any, Any]] = []
            with kept():
                found = [*held, *islice(samples, most - len(held))]
                total = size if len(found) == most else len(found)
                batch, held = found[:total], found[total:]
                if not batch or (self._drop_last and total < size):
                    return
                if step == self._first:
                    answers.append((np.arange(0), None, [signature(sample) for sample in batch[:COMPARED]]))
                shares = self._plan.batch_shares(total, self._rank) if step >= self._first else []
                for share in shares:
                    start = step * size + share.start
                    seed(self._keys, ~start)
                    indices = np.arange(start, start + share.size)
                    placed = share._replace(start=start, stop=step * size + share.stop, step=step)
                    answers.append((indices, placed, self._collate(batch[share.start : share.stop])))
            while answers:  # none of which is kept
                yield answers.pop(0)

    def _read(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples. The data set's draws follow from their positions, however far the ranks look ahead."""
        for number in count(1):
            seed(self._keys, number)
            batch = list(islice(samples, self._size))
            yield from batch
            if not batch:
                return


class Feed:
    """DataLoader over a reader that takes tasks, not indices. `options` are the DataLoader's.

    Workers persist between calls of `answers` with `stays`; `begin` is the user's `worker_init_fn`.
    """

    def __init__(self, reader: Any, *, stays: bool, begin: Callable[[int], None] | None = None, **options: Any) -> None:
        context = options.get("multiprocessing_context")
        context = torch.multiprocessing.get_context(context) if context is None or isinstance(context, str) else context
        self._unsent: Any = context.SimpleQueue() if options["num_workers"] else None
        self._reader = reader
        self._options = options | {"worker_init_fn": partial(_begin_worker, begin, self._unsent)}
        self._stays = stays and options["num_workers"] > 0
        self._tasks = None if isinstance(reader, IterableDataset) else _Tasks()
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] | None = None
        self._running: Any = None

    def answers(self, keys: counter.UInt64, tasks: Iterable[Any] = ()) -> Iterator[Any]:
        """Yield the reader's answer to each task, or its items. `keys` seed the workers' own draws."""
        if not (self._options["num_workers"] or self._options["pin_memory"]):
            # A DataLoader without workers costs more than a small net's forward pass.
            yield from self._reader if self._tasks is None else map(self._reader.__getitem__, tasks)
            return
        if self._tasks is not None:
            self._tasks.given = iter(tasks)
        # A generator of its own: else each epoch would advance torch's, and with it dropout.
        self._generator.manual_seed(int(keys[0]) >> 1)
        if self._loader is None:
            given = {"batch_size": None, "sampler": self._tasks, "collate_fn": _unchanged, "generator": self._generator}
            self._loader = DataLoader(self._reader, persistent_workers=self._stays, **given | self._options)
        before = multiprocessing.active_children()
        self._running = answers = iter(self._loader)
        for worker in set(multiprocessing.active_children()).difference(before):
            # torch ends one that does not end by itself with SIGTERM, which it ignores; Python's exit would too.
            worker.terminate = worker.kill  # type: ignore[method-assign]
        atexit.register(self.close)
        try:
            yield from answers
        except (RuntimeError, OSError, EOFError) as error:  # what it had sent is lost with it
            if self._unsent is None or self._unsent.empty():
                raise
            raise RunError(f"A data worker could not send its batch to the rank: {self._unsent.get()}") from error
        finally:
            if not self._stays:
                self.close()

    def close(self) -> None:
        """End the workers and wait. Workers stuck in a sample are killed after seconds."""
        atexit.unregister(self.close)
        _torch.end_workers(self._running)
        self._running = self._loader = None


class _Tasks:
    given: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.given


def _unchanged(answer: Any) -> Any:
    return answer


def _begin_worker(begin: Callable[[int], None] | None, unsent: Any, worker: int) -> None:
    """Prepare a data worker. Its rank answers signals; the worker ends with its rank, or with a batch not sent."""
    _torch.on_unsent(lambda error: unsent.put(one_line(error)))
    # Ctrl-C reaches every process of the terminal, and SIGTERM every process of a group where torchrun or a scheduler
    # sends it; the rank needs its workers to finish the step and save.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            # Not ignored: what the data set starts would ignore them too, and could not be ended.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
    # What was garbage in the rank is not ours to collect: a process group's end would wait for threads of the rank.
    gc.freeze()
    # torch's workers look for their parent between two tasks; one that is stuck in a sample would outlive it.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="rank watch").start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's own, which its code may ask for
    if begin is not None:
        begin(worker)


def _end_with(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_WATCH_S)
    os._exit(1)


def collated(samples: list[Any]) -> Any:
    """Collate as torch's `default_collate`, faster. Torch's takes half as long again for tuples of tensors."""
    if type(samples[0]) is not tuple or get_worker_info() is not None:  # a worker's are made in shared memory
        return default_collate(samples)
    try:
        columns = list(zip(*samples, strict=True))
    except (TypeError, ValueError):  # torch reports this
        return default_collate(samples)
    return [torch.stack(column) if type(column[0]) is Tensor else default_collate([*column]) for column in columns]


def seed(keys: counter.UInt64, number: int) -> None:
    """Seed torch's CPU, Python's and NumPy's generators by `GENERATORS` keys. `number` is that of a sample, say."""
    _seed(*counter.bits(keys, np.array([number]))[:, 0].tolist())


def _seeded(keys: counter.UInt64, indices: Indices) -> Iterator[int]:
    """Yield each sample's index after seeding the generators for it."""
    for bits, index in zip(counter.bits(keys, indices).T.tolist(), indices.tolist(), strict=True):
        _seed(*bits)
        yield index


def _seed(for_torch: int, for_python: int, for_numpy: int) -> None:
    # Not torch.manual_seed, which seeds every GPU's too; those are not given back, and it takes 100 times as long.
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_python)
    np.random.seed(for_numpy >> 32)  # it takes 32 bits
