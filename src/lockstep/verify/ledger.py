"""The ledger of a run that trains, `ledger.bin` (see `pages`): noted by every rank, written by rank 0.

While it is written, an account is kept of the samples of the epoch under way, so that it is known at the epoch's end
whether each came exactly once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, counted
from ..files import ours
from .pages import EVAL, TRAIN, Indices, Page, bits_for, pack, read, unpack
from .planned import evaluated

if TYPE_CHECKING:  # a ledger is read and judged without torch
    from ..world import World


class Tally:
    """Which of `samples` samples came how often, in memory for those that came alone: a file may claim any number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._kind = np.min_scalar_type(2 * samples)  # an index has as many bits as the largest, and may be beyond it
        self._parts = [np.empty(0, self._kind)]

    def add(self, indices: Indices) -> None:
        """Count the samples at `indices`."""
        self._parts.append(indices.astype(self._kind))

    def finding(self, expected: int | None, *, repeated: Callable[[Indices], str] | None = None) -> str | None:
        """Return in a clause why this is not each sample exactly once; None where it is.

        `expected` is how many samples were to come, all or fewer; None where it is not known, and then none may have
        come twice. `repeated` says of those that did which they are.
        """
        came = np.sort(np.concatenate(self._parts))
        known, total = came[: np.searchsorted(came, self.samples)], len(came)
        again = known[1:] == known[:-1]
        repeats = int(np.count_nonzero(again))
        different = len(known) - repeats
        said = []
        if strange := total - len(known):
            said.append(f"{counted(strange, 'index')} of none of the {self.samples:,} samples came")
        if repeats:
            twice = np.unique(known[1:][again])
            said.append(
                repeated(twice) if repeated else f"{counted(repeats, 'time')} a sample came that had come before"
            )
        if expected == self.samples:
            if different < self.samples:
                first = int(np.append(np.unique(known) != np.arange(different), True).argmax())
                said.append(f"{counted(self.samples - different, 'sample')} never came (the first: {first})")
        elif expected is not None and total != expected:
            said.append(f"{counted(total, 'sample')} came of the {expected:,} that were to come")
        return ", and ".join(said) or None


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
        `devices` those that each rank drives. Raises
        `RequestError`, on every rank, for a file that cannot be written, or is torn or damaged.
        """
        self.cost_s = 0.0
        """Seconds that this rank spent in the collective methods."""
        self.whole_epochs = 0
        """Epochs that were closed and are recorded from their beginning on; counted on rank 0."""
        self.trouble = ""
        """Why pages wait, in the system's words; empty where none does."""
        self._world = world
        self._samples = samples
        self._accumulation, self._steps_per_epoch, self._devices = accumulation, steps_per_epoch, devices
        self._notes: list[tuple[int, Indices]] = []
        self._evaluated: list[Indices] = []
        self._tally = Tally(0)
        self._epoch, self._first_step = -1, 0
        self._waiting: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._end = 0
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
        self._end = os.fstat(self._file.fileno()).st_size

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
        if self._world.is_main:
            if self._epoch != epoch:
                finding = "no step of it was noted"
            else:
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
        gathered = _exchange(self._world, notes, bits_for(samples))
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
        try:
            self._take_back()
            while self._waiting:
                # One write a page. A nearly full disk takes a part without an error, and refuses the rest.
                sent = 0
                while sent < len(self._waiting[0]):
                    sent += self._file.write(self._waiting[0][sent:])
                self._end += len(self._waiting.pop(0))
            self.trouble = ""
        except OSError as error:
            self.trouble = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._take_back()

    def _take_back(self) -> None:
        """Cut off what the disk took of a page before it refused the rest."""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size > self._end:
            self._file.truncate(self._end)


def _exchange(
    world: World, notes: list[tuple[int, Indices]], bits: int
) -> tuple[int, npt.NDArray[np.uint32], Indices] | None:
    """Return, on rank 0, the first step noted on any rank, counts (steps, ranks) and all indices (*collective*).

    None on the other ranks, and where nothing was noted.
    """
    import torch  # late: who reads a ledger needs no torch

    notes = sorted(notes, key=lambda note: note[0])
    at = np.array([step for step, _ in notes], np.int64)
    sizes = np.array([len(indices) for _, indices in notes], np.int64)
    total = int(sizes.sum())
    heads = world.stack(torch.tensor([at.min(initial=2**62), at.max(initial=-1), total])).numpy()
    first, last, most = int(heads[:, 0].min()), int(heads[:, 1].max()), int(heads[:, 2].max())
    if last < first:
        return None
    counts = np.zeros(last - first + 1, "<u4")
    np.add.at(counts, at - first, sizes.astype(counts.dtype))
    packed = pack(np.concatenate([np.empty(0, np.int64), *(indices for _, indices in notes)]), bits)
    own = counts.tobytes() + packed.ljust(-(-most * bits // 8), b"\0")
    told = world.stack(torch.frombuffer(bytearray(own), dtype=torch.uint8)).numpy()
    if not world.is_main:
        return None
    by_rank = told[:, : counts.nbytes].copy().view("<u4").astype(np.uint32)
    held = [unpack(told[rank, counts.nbytes :].tobytes(), int(heads[rank, 2]), bits) for rank in range(world.size)]
    shares = [np.split(held[rank], np.cumsum(by_rank[rank])[:-1]) for rank in range(world.size)]
    indices = np.concatenate([share for step in zip(*shares, strict=True) for share in step])
    return first, np.ascontiguousarray(by_rank.T), indices
