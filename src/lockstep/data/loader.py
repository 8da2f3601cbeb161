"""Data sets that are read sample by sample while training goes on, in worker processes.

The workers are torch's DataLoader's, which is handed the rank's shares themselves as the things to load: one task
is one share, answers come back in order, and the workers stay from epoch to epoch. A worker gets (epoch, sample
indices) and nothing else, so that what it makes depends on nothing else. What goes wrong in one travels back as a
value, and is raised here as one sentence instead of a trace through three processes.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from .. import hardware, stacks
from ..errors import RequestError, RunError
from ..failures import one_line, place
from ..interrupts import SIGNALS
from .source import Fetched, Indices, Pair, Wish

PREFETCH = 2
"""Shares that each worker prepares ahead."""
_MOST_BY_DEFAULT = 4
_WATCH_S = 1.0
"""How often a worker looks whether its rank still lives."""
_ENDING_S = 5.0
"""How long the system may take to end a worker that no longer answers."""


class Fetch(Protocol):
    """What a worker runs; it must be picklable."""

    def __call__(self, epoch: int, share: Indices) -> Pair:
        """Return samples x (n, …) and labels y (n,) int64 in host memory, n = 0 included."""


Finish = Callable[[Tensor, Indices, int], Tensor]
"""(x on the device, share, epoch) -> x as the engine wants it."""


@dataclass(frozen=True)
class _Failure:
    """What a worker sends instead of a batch."""

    sentence: str
    trace: str
    deliberate: bool


@dataclass(frozen=True)
class _Tasks:
    """The data set that the DataLoader sees: its "index" is (epoch, share), its "sample" that share's batch."""

    fetch: Fetch

    def __getitem__(self, task: tuple[int, Indices]) -> tuple[Indices, Tensor, Tensor] | _Failure:
        epoch, share = task
        try:
            return share, *self.fetch(epoch, share)
        except RequestError as error:
            return _Failure(str(error), "", deliberate=True)
        except (Exception, SystemExit, GeneratorExit, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) and get_worker_info() is None:
                raise  # the user's: a worker's can only be the data set's own
            where = "".join(f" at {note}" for note in getattr(error, "__notes__", ()))
            sentence = f"The data set failed{where}{',' if where else ''}{place(error)}: {one_line(error)}"
            return _Failure(sentence, traceback.format_exc(), deliberate=False)


class _Queue:
    """The sampler that the DataLoader sees: the tasks of the epoch that was begun last."""

    def __init__(self) -> None:
        self._tasks: Iterator[tuple[int, Indices]] = iter(())

    def begin(self, epoch: int, shares: Iterable[Indices]) -> None:
        self._tasks = ((epoch, share) for share in shares)

    def __iter__(self) -> Iterator[tuple[int, Indices]]:
        return self._tasks


def worker_count(wish: Wish) -> int:
    """Return the number of worker processes of this rank: as asked, else its share of the processors, up to 4."""
    if wish.config.workers is not None:
        return wish.config.workers
    return min(_MOST_BY_DEFAULT, max(1, hardware.cpus() // wish.world.topology.local_size))


class Streamed:
    """A source whose samples `fetch` makes in `workers` processes (0: in this one), then `finish` on the device."""

    def __init__(
        self,
        fetch: Fetch,
        finish: Finish,
        *,
        samples: int,
        classes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        workers: int,
        stay: bool,
        device: torch.device,
        skipped: tuple[str, ...] = (),
    ) -> None:
        self.classes = classes
        self.shape = shape
        self.dtype = dtype
        self.skipped = skipped
        self._samples = samples
        self._finish = finish
        self._device = device
        self._queue = _Queue()
        self._running: Any = None
        self._tasks = _Tasks(fetch)
        self._is_direct = not workers and device.type != "cuda"
        # Once, here: each worker would look for the place by writing a file there, which one that is killed leaves.
        tempfile.gettempdir()
        with warnings.catch_warnings():
            # More of them than processors may well be what somebody asks for.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader: DataLoader[Any] = DataLoader(
                self._tasks,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._queue,
                collate_fn=as_it_is,
                num_workers=workers,
                worker_init_fn=begin_worker,
                prefetch_factor=PREFETCH if workers else None,
                persistent_workers=stay and workers > 0,
                pin_memory=device.type == "cuda",
                # Unused, but without one of its own each epoch would advance torch's generator, and with it dropout.
                generator=torch.Generator(),
            )

    def __len__(self) -> int:
        return self._samples

    def stream(self, shares: Iterable[Indices], *, epoch: int) -> Generator[Fetched, None, None]:
        """Yield x and y for each share. One stream at a time; a new one ends the one before.

        Raises `RequestError` for a sample that cannot be used, `RunError` where a data set's own code failed, and
        torch's RuntimeError, which may come at any moment, for a worker process that died.
        """
        batches: Iterator[Any]
        if self._is_direct:  # a DataLoader without workers costs more than a small net's forward pass
            batches = map(self._tasks.__getitem__, ((epoch, share) for share in shares))
        else:
            batches = self._begun(epoch, shares)
        while True:
            try:
                answer = next(batches)
            except StopIteration:
                return
            except (OSError, EOFError) as error:
                self._raise_death(error)
            if isinstance(answer, _Failure):
                if answer.deliberate:
                    raise RequestError(answer.sentence)
                raise RunError(answer.sentence, trace=answer.trace)
            share, x, y = answer
            x, y = (part.to(self._device, non_blocking=True) for part in (x, y))
            yield Fetched(self._finish(x, share, epoch), y, share)

    def _begun(self, epoch: int, shares: Iterable[Indices]) -> Iterator[Any]:
        """Return what the workers answer to the shares."""
        self._queue.begin(epoch, shares)
        # Workers are born with signals held back, until they have said that they ignore them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._running = batches = iter(self._loader)
        except (OSError, EOFError) as error:  # workers that stay answer at the begin of an epoch
            self._raise_death(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for worker in getattr(batches, "_workers", ()):
            # torch, and Python at its exit, end a worker that does not end by itself with SIGTERM, which it ignores.
            worker._popen.terminate = worker._popen.kill
        return batches

    def _raise_death(self, error: Exception) -> NoReturn:
        """Raise what torch does for a worker that has ended, or `error`, which came where one ended as it sent."""
        workers = {worker.sentinel: worker.pid for worker in getattr(self._running, "_workers", ())}
        for ended in connection.wait(list(workers), timeout=_ENDING_S):
            raise RuntimeError(f"DataLoader worker (pid(s) {workers[ended]}) exited unexpectedly") from error
        raise error

    def close(self) -> None:
        """End the workers and wait for them; those that are stuck in a sample are killed after seconds."""
        # The DataLoader has no public way to say this; dropping it would leave the end to the garbage collector.
        if end := getattr(self._running, "_shutdown_workers", None):
            end()
        self._running = self._loader._iterator = None


def as_it_is(answer: Any) -> Any:
    """Return what a worker has made: the collate function of a DataLoader whose samples are batches already."""
    return answer


def begin_worker(worker: int) -> None:
    """Prepare a data worker: signals are its rank's to answer, its stacks can be asked for, and it ends with its rank.

    A DataLoader calls it as its `worker_init_fn`, with the worker's number, while signals are held back.
    """
    # Ctrl-C reaches every process of the terminal, and SIGTERM every process of a group where torchrun or a scheduler
    # sends it; the rank needs its workers to finish the step and save.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            # Not ignored: what the data set starts would ignore them too, and could not be ended.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    stacks.answer()
    # What was garbage in the rank is not ours to collect: a process group's end would wait for threads of the rank.
    gc.freeze()
    # torch's workers look for their parent between two tasks; one that is stuck in a sample would outlive it.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="rank watch").start()


def _end_with(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_WATCH_S)
    os._exit(1)
