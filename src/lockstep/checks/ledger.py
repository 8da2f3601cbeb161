"""The ledger of a run that trains, `ledger.bin` (see `pages`): noted by every rank, written by rank 0.

While it is written, an account is kept of the samples of the epoch under way, so that it is known at the epoch's end
whether each came exactly once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RequestError
from ..files import append_whole, ours
from ..world.world import World
from .exactly_once import Tally, evaluated
from .pages import EVAL, TRAIN, Indices, Page, read


class Ledger:
    """Keeps the ledger of a run that trains: every rank notes what it computes, rank 0 writes it.

    Where the disk is full, pages wait in memory and go out with the next one; training goes on.
    """

    def __init__(
        self,
        path: Path | None,
        world: World,
        *,
        samples: int,
        accumulation: int,
        steps_per_epoch: int,
        devices: int = 1,
    ) -> None:
        """Open the ledger at `path`, which a run that is continued has rewound before (*collective*).

        `path` counts on rank 0; None keeps the account without a file. `samples` are those of the training set,
        `devices` those that each rank drives. Raises `RequestError`, on every rank, for a file that cannot be written,
        or is torn or damaged.
        """
        self.cost_s = 0.0
        """Seconds that this rank spent in the collective methods."""
        self.whole_epochs = 0
        """Epochs that were closed and are recorded from their beginning on; counted on rank 0."""
        self.trouble = ""
        """Why pages wait, in the system's words; empty where none does."""
        self._world = world
        self._samples, self._steps_per_epoch = samples, steps_per_epoch
        self._accumulation, self._devices = accumulation, devices
        self._notes: list[tuple[int, Indices]] = []
        self._evaluated: list[Indices] = []
        self._tally = Tally(0)
        self._epoch, self._first_step = -1, 0
        self._waiting: list[bytes] = []
        self._file: BinaryIO | None = None
        world.together(lambda: self._open(path) if world.is_main and path is not None else None)

    def _open(self, path: Path) -> None:
        try:
            # Unbuffered: what is written is the kernel's, and survives the end of this process.
            self._file = open(path, "ab", buffering=0, opener=ours)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}; give another --output.") from error
        try:
            for page in read(path):
                self._count(page)
        except RequestError:
            self._file.close()
            raise

    @property
    def waiting(self) -> int:
        """Pages that the disk has not taken yet; 0 on all ranks but rank 0."""
        return len(self._waiting)

    def add(self, step: int, indices: Indices) -> None:
        """Note that this rank computes the samples at `indices` (n,), n may be 0, in `step`, counted from 1."""
        self._notes.append((step, indices.copy()))  # the copy: a view would keep a whole chunk of the order in memory

    def add_evaluated(self, indices: Indices) -> None:
        """Note that this rank evaluates the samples at `indices` (n,)."""
        self._evaluated.append(indices.copy())

    def flush(self, epoch: int) -> None:
        """Write the steps noted since the last time, all of `epoch`, as one page (*collective*)."""
        begun_s = time.perf_counter()
        notes, self._notes = self._notes, []
        self._keep(TRAIN, epoch, self._samples, notes)
        self.cost_s += time.perf_counter() - begun_s

    def flush_evaluation(self, epoch: int, step: int, samples: int) -> str | None:
        """Write the evaluation of `samples` samples after `step`, in `epoch`, as one page (*collective*).

        Returns, on every rank, why it did not hold each sample once, on the rank that has it; None where it did.
        """
        begun_s = time.perf_counter()
        notes, self._evaluated = [(step, indices) for indices in self._evaluated], []
        page = self._keep(EVAL, epoch, samples, notes)
        finding = (evaluated(page) if page else "nothing of it was noted") if self._world.is_main else ""
        said: str = self._world.gather(finding)[0]
        self.cost_s += time.perf_counter() - begun_s
        return f"the evaluation after step {step}: {said}" if said else None

    def close_epoch(self, epoch: int, expected: int) -> str | None:
        """Return, on every rank, why `epoch` did not hold each sample exactly once; None where it did (*collective*).

        `expected` is how many samples were to come: fewer than there are where an incomplete last batch is left out.
        Of an epoch whose beginning is not recorded, it is only asked whether a sample came twice.
        """
        self.flush(epoch)
        finding = None
        if self._world.is_main and self._epoch != epoch:
            finding = "no step of it was noted"
        elif self._world.is_main:
            whole = self._first_step == epoch * self._steps_per_epoch + 1
            self.whole_epochs += whole
            finding = self._tally.finding(expected if whole else None)
        said: str | None = self._world.gather(finding)[0]
        return None if said is None else f"epoch {epoch}: {said}"

    def close(self) -> None:
        """Write what had found no room so far, and have the disk confirm the file; `waiting` tells what is lost."""
        if self._file is not None:
            with self._file:
                self._write()
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    self.trouble = error.strerror or str(error)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, kind: str, epoch: int, samples: int, notes: list[tuple[int, Indices]]) -> Page | None:
        """Write what was noted as one page, and return it, on rank 0; None on others, and where nothing was noted."""
        gathered = _gathered(self._world, notes)
        if gathered is None:
            return None
        first_step, counts, indices = gathered
        ranks, devices = self._world.size, self._devices
        page = Page(kind, epoch, first_step, ranks, self._accumulation, samples, counts, indices, devices=devices)
        self._count(page)
        if self._file is not None:
            self._waiting.append(page.encode())
            self._write()
        return page

    def _count(self, page: Page) -> None:
        if page.kind == TRAIN:
            if page.epoch != self._epoch:
                self._epoch, self._first_step, self._tally = page.epoch, page.first_step, Tally(page.samples)
            self._tally.add(page.indices)

    def _write(self) -> None:
        assert self._file is not None
        self.trouble = ""
        try:
            while self._waiting:
                append_whole(self._file, self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            self.trouble = error.strerror or str(error)


def _gathered(world: World, notes: list[tuple[int, Indices]]) -> tuple[int, npt.NDArray[np.uint32], Indices] | None:
    """Return, on rank 0, the first step noted on any rank, counts (steps, ranks) and all indices (*collective*).

    None on the other ranks, and where nothing was noted.
    """
    notes = sorted(notes, key=lambda note: note[0])
    at = np.array([step for step, _ in notes], np.int64)
    sizes = np.array([len(indices) for _, indices in notes], np.int64)
    total = int(sizes.sum())
    heads = world.stack(torch.tensor([at.min(initial=2**62), at.max(initial=-1), total])).numpy()
    first, last, most = int(heads[:, 0].min()), int(heads[:, 1].max()), int(heads[:, 2].max())
    if last < first:
        return None
    steps = last - first + 1
    own = np.zeros(steps + most, np.int64)  # how many in each step, then which
    np.add.at(own, at - first, sizes)
    own[steps : steps + total] = np.concatenate([np.empty(0, np.int64), *(indices for _, indices in notes)])
    told = world.stack(torch.from_numpy(own)).numpy()
    if not world.is_main:
        return None
    shares = [np.split(each[steps : steps + each[:steps].sum()], np.cumsum(each[: steps - 1])) for each in told]
    indices = np.concatenate([share for step in zip(*shares, strict=True) for share in step])
    return first, np.ascontiguousarray(told[:, :steps].T.astype(np.uint32)), indices
