"""Samples read during training, by torch's DataLoader and its workers.

A sample's draws from torch's, Python's and NumPy's global generators are functions of (seed, epoch, sample index), and
leave this process's generators unchanged. Seeding them takes 15 µs, longer than reading a small sample, and most data
sets draw nothing. Until the first draw, batches are therefore read unseeded; a batch that draws is read again.
Detecting a draw takes 0.1 ms per batch.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate, get_worker_info

from .. import _torch, user_code
from ..batching import BatchPlan
from ..errors import LockstepError, RunError, counted
from ..monitor.failures import one_line, place
from ..monitor.signals import SIGNALS
from ..world.random_state import Generators, preserve_generators
from . import counter
from .ranks import COMPARED, Signature, is_alike, signature
from .source import Indices
from .transfer import to_device

GENERATORS = 3
"""Number of generators, each with its own key: torch and NumPy have one algorithm, and would draw the same numbers."""
MIXES, PACKS = "mixes", "packs"
"""How a collate function makes batches: a sample depends on the others in its batch; a sample has several rows."""
_FOLLOWING = 64
"""Samples, and the rest of their batch, that show whether a state restores a stream."""
_WATCH_S = 1.0


class Name(str):
    """Name of a data set, module:attribute. A spawned worker imports the module when unpickling it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _import_name, (str(self),)


def _import_name(name: str) -> Name:
    if ":" in name:
        user_code.load("--data", name)
    return Name(name)


class Batches:
    """Batches of a map-style data set. The answer to a task (keys, indices, note) is (indices, note, batch).

    Without a note, the answer has (the samples' signatures, how they collate) in place of a batch. For a data set that
    `--data` names, a sample's error is one sentence, instead of a trace through three processes. `check` is called with
    (index, sample) for a batch's first sample, and for all samples of a batch that cannot be collated: a check takes as
    long as reading the sample.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] = default_collate,
        name: str = "",
        split: str = "",
        check: Callable[[int, Any], object] | None = None,
    ) -> None:
        self._name = Name(name)  # before `dataset`, whose class unpickling imports from that module
        self.dataset, self._split, self._check = dataset, split, check
        self._collate = collate
        self._draws = False

    def __getitem__(self, task: tuple[counter.UInt64, Indices, Any]) -> tuple[Indices, Any, Any]:
        """Return the collated batch, or a `LockstepError`: torch would add a trace to a raised one."""
        keys, indices, note = task
        try:
            if note is None:
                return indices, note, (self.signatures(keys, indices), self._collation(keys, indices))
            return indices, note, self._read(keys, indices)
        except LockstepError as error:
            if not self._name:
                raise
            return indices, note, error
        except StopIteration as error:  # it would silently end the epoch
            raise RuntimeError("the data set, or its collate function, raised StopIteration") from error

    def signatures(self, keys: counter.UInt64, indices: Indices) -> list[Signature | None]:
        """Return the samples' signatures; None for a sample that differs between two readings."""
        pairs = (
            [signature(self._sample(keys, indices[[position]])) for _ in range(2)] for position in range(len(indices))
        )
        return [first if is_alike(first, second) else None for first, second in pairs]

    def _collation(self, keys: counter.UInt64, indices: Indices) -> str:
        """Return how a batch differs from its halves that are collated apart: MIXES, PACKS or ""."""
        middle = len(indices) // 2
        if self._collate is default_collate or not middle:
            return ""
        batches = []
        with preserve_generators(), contextlib.suppress(Exception):  # it may need more samples
            for part in (indices, indices[:middle], indices[middle:]):
                samples = [self._sample(keys, part[[position]]) for position in range(len(part))]
                seed(keys, ~int(indices[0]))
                batches.append(self._collate(samples))
        return _compare_halves(batches, len(indices)) if len(batches) == 3 else ""

    def _sample(self, keys: counter.UInt64, index: Indices) -> Any:
        """Return the uncollated sample at `index` (1,): a user's collate function may need several samples."""
        with preserve_generators():
            getitems = getattr(self.dataset, "__getitems__", None)
            seed(keys, int(index[0]))
            return getitems(index.tolist())[0] if getitems else self._samples(index.tolist())[0]

    def _read(self, keys: counter.UInt64, indices: Indices) -> Any:
        dataset = self.dataset
        if type(dataset) is TensorDataset and self._collate is default_collate:
            # Collating single samples takes longer than a small net's step.
            rows, devices = torch.from_numpy(indices), {tensor.device for tensor in dataset.tensors}
            rows_on = {device: to_device(rows, device) for device in devices}
            return [tensor.index_select(0, rows_on[tensor.device]) for tensor in dataset.tensors]
        states = Generators.now(())
        if not self._draws:
            getitems, index_list = None if self._name else getattr(dataset, "__getitems__", None), indices.tolist()
            batch = self._make_batch(indices, getitems(index_list) if getitems else self._samples(index_list))
            if states.is_now():
                return batch
            self._draws = True
        try:
            samples = self._samples(_seeded(keys, indices))
            seed(keys, ~int(indices[0]))  # for the collate function; no sample's index is negative
            return self._make_batch(indices, samples)
        finally:
            states.put_back(())

    def _samples(self, indices: Iterable[int]) -> list[Any]:
        samples, index = [], 0
        try:
            for index in indices:
                samples.append(self.dataset[index])
        except Exception as error:
            if not self._name or isinstance(error, LockstepError):
                raise
            origin = f"{self._split} sample {index} of --data {self._name},{place(error)}"
            raise RunError(
                f"The data set failed at {origin}: {one_line(error)}", trace=traceback.format_exc()
            ) from error
        return samples

    def _make_batch(self, indices: Indices, samples: list[Any]) -> Any:
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


class Mark(NamedTuple):
    """Where a stream is after a batch: the data set's state as JSON, or "", and the batch's last sample."""

    state: str
    last: Signature


class Stream(IterableDataset[Any]):
    """One rank's shares of an epoch of an iterable data set. Every rank reads all of it; shares begin at batch `first`.

    Answers are those of `Batches`; before a share, the batch's `Mark`. The first answer has the first samples'
    signatures, and whether the stream is that of the `marks` that an earlier run had before and after batch
    `first` - 1. If the data set's state restores it there, earlier batches are not read. `spare` is the number of
    ranks, or 0. If not 0, a last batch of fewer samples than ranks is added to the previous one, so that no share is
    empty.
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
        marks: Sequence[Mark] = (),
    ) -> None:
        self.dataset, self._collate, self._drop_last = loader.dataset, loader.collate_fn, loader.drop_last and not spare
        self._size, self._plan = plan.global_size, dataclasses.replace(plan, global_size=plan.global_size + spare)
        self._rank, self._keys, self._epoch, self._first = rank, keys, epoch, first
        self._marks = marks

    def __iter__(self) -> Iterator[tuple[Indices, Any, Any]]:
        size, longest, buffer, is_same = self._size, self._plan.global_size, list[Any](), True
        if get_worker_info() is not None:  # in which Hugging Face's streams would shuffle otherwise
            torch.utils.data.get_worker_info = lambda: None
        with preserve_generators():
            begin, dataset, samples = self._restored() or (0, *self._opened())
        for step in count(begin):
            answers: list[tuple[Indices, Any, Any]] = []
            with preserve_generators():
                window = [*buffer, *islice(samples, longest - len(buffer))]
                total = size if len(window) == longest else len(window)
                batch, buffer = window[:total], window[total:]
                if not batch or (self._drop_last and total < size):
                    return
                if step == self._first - 1 and self._marks:
                    is_same = signature(batch[-1]) == self._marks[-1].last
                if step == self._first:
                    first_samples = [signature(sample) for sample in batch[:COMPARED]]
                    answers.append((np.arange(0), None, (first_samples, "", is_same)))
                if step >= self._first and longest == size:
                    answers.append((np.arange(0), None, (step + 1, _mark(dataset, batch))))
                shares = self._plan.batch_shares(total, self._rank) if step >= self._first else []
                for share in shares:
                    start = step * size + share.start
                    seed(self._keys, ~start)
                    indices = np.arange(start, start + share.size)
                    placed = share._replace(start=start, stop=step * size + share.stop, step=step)
                    answers.append((indices, placed, self._collate(batch[share.start : share.stop])))
            while answers:  # popped, so that a sent answer is freed
                yield answers.pop(0)

    def _restored(self) -> tuple[int, Any, Iterator[Any]] | None:
        """Return (batch `first`, a copy of the data set there, its samples) by its state; None if that does not work.

        A state may leave out samples, such as those of a shuffle buffer. So the batch before, and samples that follow
        from either mark, are read and compared.
        """
        if len(self._marks) < 2 or not all(mark.state for mark in self._marks):
            return None
        (state_before, _), (state_after, last) = self._marks
        size, first = self._size, self._first
        count = -(-_FOLLOWING // size) * size
        with contextlib.suppress(Exception):  # the user's code: a stream that is read from its beginning needs none
            earlier, later = self._opened(first - 1, state_before)[1], self._opened(first, state_after)[1]
            *_, sample = islice(earlier, size)
            following, expected = ([signature(item) for item in islice(items, count)] for items in (earlier, later))
            if signature(sample) == last and following == expected and len(expected) == count:
                return first, *self._opened(first, state_after)
        return None

    def _opened(self, step: int = 0, state: str = "") -> tuple[Any, Iterator[Any]]:
        """Return the data set and its samples, or a copy and its samples from batch `step` on, which is its `state`."""
        dataset: Any = copy.deepcopy(self.dataset) if state else self.dataset
        if set_epoch := getattr(dataset, "set_epoch", None):
            set_epoch(self._epoch)
        if state:
            dataset.load_state_dict(json.loads(state))
        seed(self._keys, 0)
        return dataset, self._read(iter(dataset), step)

    def _read(self, samples: Iterator[Any], step: int) -> Iterator[Any]:
        """Yield the samples. The data set's draws are functions of their positions, however far a rank reads ahead."""
        for number in count(step + 1):
            seed(self._keys, number)
            batch = list(islice(samples, self._size))
            yield from batch
            if not batch:
                return


def _mark(dataset: Any, batch: Sequence[Any]) -> Mark:
    state = ""
    with contextlib.suppress(Exception):  # without a state, or with one that is no JSON
        state = json.dumps(dataset.state_dict(), sort_keys=True)
    return Mark(state, signature(batch[-1]))


class Feed:
    """DataLoader over a reader of tasks instead of indices. `options` are the DataLoader's.

    With `stays`, workers persist between calls of `answers`; `begin` is the user's `worker_init_fn`.
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
        """Yield the reader's answer to each task, or its items. `keys` seeds the workers' own draws."""
        if not (self._options["num_workers"] or self._options["pin_memory"]):
            # A DataLoader without workers costs more than a small net's forward pass.
            yield from self._reader if self._tasks is None else map(self._reader.__getitem__, tasks)
            return
        if self._tasks is not None:
            self._tasks.iterator = iter(tasks)
        # A separate generator: otherwise each epoch would advance torch's, and change dropout.
        self._generator.manual_seed(int(keys[0]) >> 1)
        if self._loader is None:
            defaults = {
                "batch_size": None,
                "sampler": self._tasks,
                "collate_fn": _identity,
                "generator": self._generator,
            }
            self._loader = DataLoader(self._reader, persistent_workers=self._stays, **defaults | self._options)
        children = multiprocessing.active_children()
        self._running = answers = iter(self._loader)
        for worker in set(multiprocessing.active_children()).difference(children):
            # torch, and Python at exit, end a stuck worker by SIGTERM, which workers ignore.
            worker.terminate = worker.kill  # type: ignore[method-assign]
        atexit.register(self.close)
        try:
            yield from answers
        except (RuntimeError, OSError, EOFError) as error:  # the batch that it was sending is lost
            report = self._read_unsent()
            if report is None:
                raise
            with contextlib.suppress(RuntimeError):  # the handler's, where it comes late
                self.close()
            raise RunError(f"A data worker could not send its batch to the rank: {report}") from error
        finally:
            if not self._stays:
                self.close()

    def _read_unsent(self) -> Any:
        """Return the report of a batch that a worker could not send; None without one."""
        for _ in range(3):  # torch's handler of SIGCHLD raises once per ended worker, wherever this process is
            with contextlib.suppress(RuntimeError):
                return None if self._unsent is None or self._unsent.empty() else self._unsent.get()
        return None

    def close(self) -> None:
        """End the workers and wait for them. Workers stuck in a sample are killed after seconds."""
        atexit.unregister(self.close)
        _torch.end_workers(self._running)
        self._running = self._loader = None


class _Tasks:
    iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def _identity(answer: Any) -> Any:
    return answer


def _begin_worker(begin: Callable[[int], None] | None, unsent: Any, worker: int) -> None:
    """Prepare a data worker: it ignores signals, ends with its rank, and reports a batch that it cannot send."""
    _torch.on_unsent(lambda error: unsent.put(one_line(error)))
    # Ctrl-C reaches every process of the terminal; torchrun and schedulers send SIGTERM to every process of a group.
    # The rank needs its workers to finish the step and save.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP is ignored under nohup
            # A handler, not SIG_IGN: child processes of the data set would inherit that, and could not be ended.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
    # Do not collect the rank's garbage here: destroying a process group would wait for threads of the rank.
    gc.freeze()
    # torch's workers check for their parent between two tasks; a worker stuck in a sample would outlive it.
    threading.Thread(target=_exit_with_rank, args=(os.getppid(),), daemon=True, name="rank watch").start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's data set, which user code may read
    if begin is not None:
        begin(worker)


def _exit_with_rank(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_WATCH_S)
    os._exit(1)


def _compare_halves(batches: Sequence[Any], size: int) -> str:
    """Compare a batch of `size` samples with its two halves; see `Batches._collation`."""
    doubt = ""
    for tensor, *halves in zip(*map(_tensors, batches), strict=False):
        if not tensor.dim() or any(not half.dim() or half.shape[1:] != tensor.shape[1:] for half in halves):
            continue  # padded to the longest sample, or squeezed
        joined = torch.cat(halves)
        if len(joined) != len(tensor):
            continue
        if not torch.equal(joined, tensor) and not torch.allclose(joined.double(), tensor.double(), equal_nan=True):
            return MIXES
        doubt = PACKS if len(tensor) > size else doubt
    return doubt


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in _tensors(part)]
    return [batch] if isinstance(batch, Tensor) and batch.layout is torch.strided and not batch.is_complex() else []


def seed(keys: counter.UInt64, number: int) -> None:
    """Seed torch's CPU, Python's and NumPy's generators by `GENERATORS` keys and a `number`, such as a sample index."""
    _seed(*counter.bits(keys, np.array([number]))[:, 0].tolist())


def _seeded(keys: counter.UInt64, indices: Indices) -> Iterator[int]:
    """Yield each sample's index after seeding the generators for it."""
    for bits, index in zip(counter.bits(keys, indices).T.tolist(), indices.tolist(), strict=True):
        _seed(*bits)
        yield index


def _seed(for_torch: int, for_python: int, for_numpy: int) -> None:
    # Not torch.manual_seed: it also seeds the GPUs' generators, which are not restored, and takes 100 times as long.
    torch.default_generator.manual_seed(for_torch)
    random.seed(for_python)
    np.random.seed(for_numpy >> 32)  # NumPy's seed has 32 bits
