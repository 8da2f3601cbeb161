"""The ledger of a run that trains, `ledger.bin` (see `pages`): noted by every rank, written by rank 0.

The samples of the epoch under way are counted meanwhile, so that its end tells whether each came exactly once.
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
from .exactly_once import Tally, of_evaluation
from .pages import EVAL, TRAIN, Indices, Page, read

Notes = list[tuple[int, Indices]]
"""The samples (n,) that a rank has computed, by step."""


class Ledger:
    """Keeps the ledger of a run. Pages that a full disk does not take wait in memory; training goes on."""

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

        `path` counts on rank 0; None is no file. `samples` are those of the training set, `devices` those of each rank.
        Raises `RequestError`, on every rank, for a file that cannot be written, or is torn or damaged.
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
        self._notes: Notes = []
        self._evaluated: Notes = []
        self._begin: Page | None = None
        """The first page of the epoch under way."""
        self._tally = Tally(0)
        self._waiting: list[bytes] = []
        self._file: BinaryIO | None = None
        world.together(lambda: self._open(path) if world.is_main and path is not None else None)

    def _open(self, path: Path) -> None:
        for page in read(path) if path.exists() else ():
            self._count(page)
        try:
            # Unbuffered: what is written is the kernel's, and survives the end of this process.
            self._file = open(path, "ab", buffering=0, opener=ours)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}; give another --output.") from error

    @property
    def waiting(self) -> int:
        """Pages that the disk has not taken yet; 0 on all ranks but rank 0."""
        return len(self._waiting)

    def add(self, step: int, indices: Indices) -> None:
        """Note that this rank computes the samples at `indices` (n,), n may be 0, in `step`, counted from 1."""
        self._notes.append((step, indices.copy()))  # the copy: a view would keep a whole chunk of the order in memory

    def add_evaluated(self, indices: Indices) -> None:
        """Note that this rank evaluates the samples at `indices` (n,)."""
        self._evaluated.append((0, indices.copy()))

    def flush(self, epoch: int) -> None:
        """Write the steps noted since the last time, all of `epoch`, as one page (*collective*)."""
        notes, self._notes = self._notes, []
        self._keep(TRAIN, epoch, self._samples, notes)

    def flush_evaluation(self, epoch: int, step: int, samples: int) -> str:
        """Write the evaluation of `samples` samples after `step`, in `epoch`, as one page (*collective*).

        Returns, on every rank, why it did not hold each sample once, and on which rank; "" where it did.
        """
        notes, self._evaluated = [(step, indices) for _, indices in self._evaluated], []
        page = self._keep(EVAL, epoch, samples, notes)
        found = (of_evaluation(page) if page else "nothing of it was noted") if self._world.is_main else ""
        return self._told(f"the evaluation after step {step}: {found}" if found else "")

    def close_epoch(self, epoch: int, expected: int) -> str:
        """Return, on every rank, why `epoch` did not hold each sample exactly once; "" where it did (*collective*).

        `expected` is how many samples were to come: fewer than there are where an incomplete last batch is left out.
        Where its beginning is not recorded, it is only asked whether a sample came twice.
        """
        self.flush(epoch)
        found, begin = "", self._begin
        if self._world.is_main and (begin is None or begin.epoch != epoch):
            found = "no step of it was noted"
        elif begin is not None:
            is_whole = begin.first_step == epoch * self._steps_per_epoch + 1
            self.whole_epochs += is_whole
            found = self._tally.finding(expected if is_whole else None)
        return self._told(f"epoch {epoch}: {found}" if found else "")

    def close(self) -> None:
        """Write what had found no room so far, and have the disk confirm the file; `waiting` tells what is lost."""
        if self._file is not None:
            with self._file:
                self._write()
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    self.trouble = error.strerror or str(error)

    def _told(self, finding: str) -> str:
        """Return what rank 0 has found (*collective*)."""
        begun_s = time.perf_counter()
        found: str = self._world.gather(finding)[0]
        self.cost_s += time.perf_counter() - begun_s
        return found

    def _keep(self, kind: str, epoch: int, samples: int, notes: Notes) -> Page | None:
        """Write what all ranks have noted as one page (*collective*); return it on rank 0 where that is anything."""
        begun_s = time.perf_counter()
        page = None
        if (gathered := _gathered(self._world, notes)) is not None:
            first_step, counts, indices = gathered
            ranks, devices = self._world.size, self._devices
            page = Page(kind, epoch, first_step, ranks, self._accumulation, samples, counts, indices, devices=devices)
            self._count(page)
            if self._file is not None:
                self._waiting.append(page.encode())
                self._write()
        self.cost_s += time.perf_counter() - begun_s
        return page

    def _count(self, page: Page) -> None:
        if page.kind == TRAIN:
            if self._begin is None or page.epoch != self._begin.epoch:
                self._begin, self._tally = page, Tally(page.samples)
            self._tally.add(page)

    def _write(self) -> None:
        assert self._file is not None
        self.trouble = ""
        try:
            while self._waiting:
                append_whole(self._file, self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            self.trouble = error.strerror or str(error)


def _gathered(world: World, notes: Notes) -> tuple[int, npt.NDArray[np.uint32], Indices] | None:
    """Return the first step noted on any rank, counts (steps, ranks) and all indices, on rank 0 (*collective*).

    None on the other ranks, and where nothing was noted.
    """
    at = np.array([step for step, _ in notes], np.int64)
    sizes = np.array([len(indices) for _, indices in notes], np.int64)
    heads = world.stack(torch.tensor([at.min(initial=2**62), at.max(initial=-1), sizes.sum()])).numpy()
    first, last, most = int(heads[:, 0].min()), int(heads[:, 1].max()), int(heads[:, 2].max())
    if last < first:
        return None
    steps = last - first + 1
    own = np.zeros(steps + most, np.int64)  # how many in each step, then which
    np.add.at(own, at - first, sizes)
    held = np.concatenate([np.empty(0, np.int64), *(notes[number][1] for number in np.argsort(at, kind="stable"))])
    own[steps : steps + len(held)] = held
    told = world.stack(torch.from_numpy(own)).numpy()
    if not world.is_main:
        return None
    shares = [np.split(each[steps : steps + each[:steps].sum()], np.cumsum(each[: steps - 1])) for each in told]
    indices = np.concatenate([share for step in zip(*shares, strict=True) for share in step])
    return first, np.ascontiguousarray(told[:, :steps].T.astype(np.uint32)), indices
