"""The ledger of a run, `ledger.bin`: which sample went into which optimizer step on which rank.

The file is a sequence of pages, each written in one piece and never changed. A page holds consecutive optimizer steps
of one epoch, or one evaluation: a header of fixed size, how many samples each rank computed in each step, and their
indices in the order in which they were computed, packed to as many bits as the data set needs. Each page carries its
own number of ranks, so that a run may go on in another world. The header and the rest have a checksum each: a page
that a kill cut short is so told apart from one that was damaged. There is no pickle in it and no text.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, counted
from ..files import write_whole

if TYPE_CHECKING:  # a ledger is read and judged without torch
    from ..world import World

NAME = "ledger.bin"
TRAIN, EVAL = "train", "eval"
Indices = npt.NDArray[np.int64]

_MAGIC = b"LKSL"
_VERSION = 1
_KINDS = (TRAIN, EVAL)
# magic, version, kind, bits an index, ranks, accumulation, epoch, first step, steps, samples in the data set,
# indices, checksum of counts and indices, checksum of the header before it
_HEADER = struct.Struct("<4sHBBIIQQIQQII")
_CHUNK = 1 << 16
"""Indices packed at a time: a multiple of 8, so that each chunk ends with a whole byte."""


class TornError(RequestError):
    """The file ends in the middle of its last page, as a killed run leaves it; all pages before are whole."""


def bits_for(samples: int) -> int:
    """Return the bits that an index of a data set of `samples` samples takes."""
    return max(1, (samples - 1).bit_length())


def pack(indices: Indices, bits: int) -> bytes:
    """Return `indices` (n,) with `bits` bits each, lowest bit first, in ⌈n · bits ÷ 8⌉ bytes."""
    assert not len(indices) or (indices.min() >= 0 and int(indices.max()) >> bits == 0), "an index of no sample"
    chunks = []
    for start in range(0, len(indices), _CHUNK):
        octets = indices[start : start + _CHUNK].astype("<i8").view(np.uint8).reshape(-1, 8)[:, : -(-bits // 8)]
        each = np.unpackbits(octets, axis=1, count=bits, bitorder="little")
        chunks.append(np.packbits(each, bitorder="little").tobytes())
    return b"".join(chunks)


def unpack(data: bytes, number: int, bits: int) -> Indices:
    """Return the `number` indices that `pack` made `data` of, (number,)."""
    octets = np.frombuffer(data, np.uint8)
    indices = np.empty(number, np.int64)
    for start in range(0, number, _CHUNK):
        size = min(_CHUNK, number - start)
        part = octets[start * bits // 8 : -(-(start + size) * bits // 8)]
        each = np.unpackbits(part, count=size * bits, bitorder="little").reshape(size, bits)
        held = np.zeros((size, 8), np.uint8)
        held[:, : -(-bits // 8)] = np.packbits(each, axis=1, bitorder="little")
        indices[start : start + size] = held.view("<i8")[:, 0]
    return indices


@dataclass(frozen=True, eq=False)
class Page:
    """Consecutive optimizer steps of one epoch (kind `TRAIN`), or the evaluation after a step (kind `EVAL`)."""

    kind: str
    epoch: int
    first_step: int
    """Counted from 1, over the whole run."""
    ranks: int
    accumulation: int
    """Global micro-batches of a whole batch."""
    samples: int
    """In the data set: the one that is trained on, or the one that is evaluated."""
    counts: npt.NDArray[np.uint32]
    """(steps, ranks): how many samples each rank computed in each step; an evaluation counts as one step."""
    indices: Indices
    """(counts.sum(),): the samples by step, then rank, then as the rank computed them."""

    @property
    def steps(self) -> int:
        """The number of steps on this page."""
        return len(self.counts)

    @property
    def last_step(self) -> int:
        """The last step on this page."""
        return self.first_step + self.steps - 1

    @functools.cached_property
    def ends(self) -> Indices:
        """Where in `indices` each share ends, (steps × ranks,)."""
        return np.cumsum(self.counts.reshape(-1), dtype=np.int64)

    def share(self, step: int, rank: int) -> Indices:
        """Return the samples that `rank` computed in `step`, in the order in which it did."""
        cell = (step - self.first_step) * self.ranks + rank
        return self.indices[self.ends[cell] - self.counts.reshape(-1)[cell] : self.ends[cell]]

    def until(self, step: int) -> Page | None:
        """Return the page without the steps after `step`; None where none is left."""
        if self.last_step <= step:
            return self
        steps = step - self.first_step + 1
        if steps <= 0:
            return None
        return replace(self, counts=self.counts[:steps], indices=self.indices[: self.ends[steps * self.ranks - 1]])

    def encode(self) -> bytes:
        """Return the page as the file holds it."""
        assert self.counts.shape == (self.steps, self.ranks), self.counts.shape
        assert self.counts.sum() == len(self.indices), "each index is some rank's"
        bits = bits_for(self.samples)
        body = self.counts.astype("<u4").tobytes() + pack(self.indices, bits)
        numbers = (_KINDS.index(self.kind), bits, self.ranks, self.accumulation, self.epoch, self.first_step)
        held = (self.steps, self.samples, len(self.indices), zlib.crc32(body))
        header = _HEADER.pack(_MAGIC, _VERSION, *numbers, *held, 0)[:-4]
        return header + struct.pack("<I", zlib.crc32(header)) + body


def read(path: Path, *, torn_ok: bool = False) -> Iterator[Page]:
    """Yield the pages of the ledger at `path`, one at a time.

    Raises `RequestError` where there is none, for a page that is damaged, and for one of another version of this
    format; and `TornError`, which is one, where a kill cut the last page short, unless `torn_ok`.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a run that kept a ledger.") from error
    with file:
        size, number = os.fstat(file.fileno()).st_size, 0
        while (start := file.tell()) < size:
            number += 1
            at = f"{path}, page {number}, from byte {start} on,"
            page = _next(file, size - start, at)
            if page is None and torn_ok:
                return
            if page is None:
                raise TornError(
                    f"{at} is cut short, as a kill while it was written leaves it; continue the run, which cuts it "
                    "off and records those steps anew."
                )
            yield page


def _next(file: IO[bytes], left: int, at: str) -> Page | None:
    """Return the page at the file's position, with `left` bytes to its end; None where these are only its beginning."""
    header = file.read(_HEADER.size)
    if header[:4] != _MAGIC[: len(header)]:
        raise _damaged(at)
    if len(header) < _HEADER.size:
        return None
    _, version, kind, bits, ranks, accumulation, epoch, first, steps, samples, held, body_sum, own_sum = _HEADER.unpack(
        header
    )
    if version != _VERSION:
        raise RequestError(
            f"{at} is of version {version} of the ledger's format, and this lockstep reads version {_VERSION}; "
            "read it with the one that wrote it."
        )
    # The header is judged before its numbers are believed: a damaged one would say where the next page begins.
    if own_sum != zlib.crc32(header[:-4]) or kind >= len(_KINDS) or bits != bits_for(samples):
        raise _damaged(at)
    counts_bytes = steps * ranks * 4
    length = counts_bytes + -(-held * bits // 8)
    if left < _HEADER.size + length:
        return None
    body = file.read(length)
    counts = np.frombuffer(body[:counts_bytes], "<u4").reshape(steps, ranks).astype(np.uint32)
    if zlib.crc32(body) != body_sum or counts.sum() != held:
        raise _damaged(at)
    indices = unpack(body[counts_bytes:], held, bits)
    return Page(_KINDS[kind], epoch, first, ranks, accumulation, samples, counts, indices)


def _damaged(at: str) -> RequestError:
    return RequestError(
        f"{at} is damaged: its checksum is another; give another copy of it, or move it away and continue the run "
        "with a new one."
    )


def where(pages: Iterable[Page], sample: int) -> list[tuple[int, int, int]]:
    """Return (epoch, step, rank) of each time that `sample` was trained on."""
    return [place for page in pages if page.kind == TRAIN for place in places(page, sample)]


def places(page: Page, sample: int) -> list[tuple[int, int, int]]:
    """Return (epoch, step, rank) of each time that `sample` is on the page."""
    cells = np.searchsorted(page.ends, np.flatnonzero(page.indices == sample), side="right").tolist()
    return [(page.epoch, page.first_step + cell // page.ranks, cell % page.ranks) for cell in cells]


def rewind(path: Path, *, step: int) -> None:
    """Cut the ledger back to what had happened by `step`, atomically, so that a resumed run goes on from there.

    Steps and evaluations after `step` go, and so does a last page that a kill cut short. A file that is not there is
    left so. Raises `RequestError` for a ledger that is damaged.
    """
    if path.exists() and len(kept := _until(path, step)) != path.stat().st_size:
        write_whole(path, kept)


def carry_over(source: Path, path: Path, *, step: int) -> None:
    """Begin the ledger at `path` with what the run in the folder `source` had done by `step`, where it has a ledger.

    Raises `RequestError` for one that is damaged.
    """
    if (source / NAME).exists():
        write_whole(path, _until(source / NAME, step))


def _until(path: Path, step: int) -> bytes:
    kept = (page.until(step) for page in read(path, torn_ok=True))
    return b"".join(page.encode() for page in kept if page is not None)


class Tally:
    """Which of `samples` samples have come so far, in a byte for each."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.total = 0
        self._strange = 0
        self._seen = np.zeros(samples, np.bool_)

    def add(self, indices: Indices) -> None:
        """Count the samples at `indices`."""
        known = indices
        if len(indices) and indices.max() >= self.samples:
            known = indices[indices < self.samples]
        self._seen[known] = True
        self.total += len(indices)
        self._strange += len(indices) - len(known)

    @property
    def repeats(self) -> int:
        """How often a sample came that had come before."""
        return self.total - self._strange - int(np.count_nonzero(self._seen))

    def finding(self, expected: int | None, *, repeated: str = "") -> str | None:
        """Return in a clause why this is not each sample exactly once; None where it is.

        `expected` is how many samples were to come, all or fewer; None where it is not known, and then none may have
        come twice. `repeated` says of those that did which they are.
        """
        said = []
        if self._strange:
            said.append(f"{counted(self._strange, 'index')} of none of the {self.samples:,} samples came")
        if repeats := self.repeats:
            said.append(repeated or f"{counted(repeats, 'time')} a sample came that had come before")
        missing = self.samples - int(np.count_nonzero(self._seen))
        if expected == self.samples:
            if missing:
                said.append(f"{counted(missing, 'sample')} never came (the first: {int(self._seen.argmin())})")
        elif expected is not None and self.total != expected:
            said.append(f"{counted(self.total, 'sample')} came of the {expected:,} that were to come")
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
        evaluated_samples: int,
        accumulation: int,
        steps_per_epoch: int,
    ) -> None:
        """Open the ledger at `path`, which a run that is continued has rewound before (*collective*).

        `path` counts on rank 0; None keeps the account without a file. `samples` are those of the training set,
        `evaluated_samples` those of the set that is evaluated. Raises `RequestError`, on every rank, for a file that
        cannot be written, or is torn or damaged.
        """
        self.cost_s = 0.0
        """Seconds that this rank spent in the collective methods."""
        self.trouble = ""
        """Why pages wait, in the system's words; empty where none does."""
        self._world = world
        self._samples, self._evaluated_samples = samples, evaluated_samples
        self._accumulation, self._steps_per_epoch = accumulation, steps_per_epoch
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
            self._file = path.open("ab", buffering=0)
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

    def flush_evaluation(self, epoch: int, step: int) -> None:
        """Write the evaluation after `step`, in `epoch`, as one page (*collective*)."""
        begun_s = time.perf_counter()
        notes, self._evaluated = [(step, indices) for indices in self._evaluated], []
        self._keep(EVAL, epoch, self._evaluated_samples, notes)
        self.cost_s += time.perf_counter() - begun_s

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

    def _keep(self, kind: str, epoch: int, samples: int, notes: list[tuple[int, Indices]]) -> None:
        gathered = _exchange(self._world, notes, bits_for(samples))
        if gathered is not None:
            first_step, counts, indices = gathered
            ranks = self._world.size
            page = Page(kind, epoch, first_step, ranks, self._accumulation, samples, counts, indices)
            self._count(page)
            if self._file is not None:
                self._waiting.append(page.encode())
                self._write()

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
