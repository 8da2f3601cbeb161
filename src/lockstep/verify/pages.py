"""The pages of a ledger, packed as bits: which sample went into which optimizer step on which rank.

A ledger, `ledger.bin`, is a sequence of pages, each written in one piece and never changed. A page holds consecutive
optimizer steps of one epoch, or one evaluation: a header of fixed size, how many samples each rank computed in each
step, and their indices in the order in which they were computed, packed to as many bits as the data set needs. Each
page carries its own number of ranks, so that a run may go on in another world. The header and the rest have a checksum
each: a page that a kill cut short is so told apart from one that was damaged. There is no pickle in it and no text.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, counted
from ..files import foreign, write_whole

NAME = "ledger.bin"
TRAIN, EVAL = "train", "eval"
Indices = npt.NDArray[np.int64]

_MAGIC = b"LKSL"
_VERSION = 1
_KINDS = (TRAIN, EVAL)
# magic, version, kind, bits an index, ranks, devices of a rank but the first, accumulation, epoch, first step, steps,
# samples in the data set, indices, checksum of counts and indices, checksum of the header before it
_HEADER = struct.Struct("<4sHBBHHIQQIQQII")
_CHUNK = 1 << 16
"""Indices packed at a time: a multiple of 8, so that each chunk ends with a whole byte."""
MOST_SAMPLES = 1 << 40
"""In a data set."""


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
    devices: int = 1
    """Devices that each rank drives."""

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
        world = (self.ranks, self.devices - 1)
        numbers = (_KINDS.index(self.kind), bits, *world, self.accumulation, self.epoch, self.first_step)
        held = (self.steps, self.samples, len(self.indices), zlib.crc32(body))
        header = _HEADER.pack(_MAGIC, _VERSION, *numbers, *held, 0)[:-4]
        return header + struct.pack("<I", zlib.crc32(header)) + body


def read(path: Path, *, torn_ok: bool = False) -> Iterator[Page]:
    """Yield the pages of the ledger at `path`, one at a time.

    Raises `RequestError` where there is none, for a page that is damaged, and for one of another version of this
    format; and `TornError`, which is one, where a kill cut the last page short, unless `torn_ok`.
    """
    try:
        file = open(path, "rb", opener=foreign)
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
    _, version, kind, bits, ranks, further, *numbers, steps, samples, held, body_sum, own_sum = _HEADER.unpack(header)
    if version != _VERSION:
        raise RequestError(
            f"{at} is of version {version} of the ledger's format, and this lockstep reads version {_VERSION}; "
            "read it with the one that wrote it."
        )
    accumulation, epoch, first = numbers
    # The header is judged before its numbers are believed: a damaged one would say where the next page begins.
    is_ours = kind < len(_KINDS) and bits == bits_for(samples) and 0 < samples <= MOST_SAMPLES and first < 2**62
    if own_sum != zlib.crc32(header[:-4]) or not is_ours or not (steps and ranks and accumulation):
        raise _damaged(at)
    # A page is of one epoch. Of a small data set, as many bytes would hold many more indices than of a large one.
    if held > 4 * samples + _CHUNK:
        raise RequestError(f"{at} holds {held:,} indices, and the data set has {counted(samples, 'sample')}.")
    counts_bytes = steps * ranks * 4
    length = counts_bytes + -(-held * bits // 8)
    if left < _HEADER.size + length:
        return None
    body = file.read(length)
    counts = np.frombuffer(body[:counts_bytes], "<u4").reshape(steps, ranks).astype(np.uint32)
    if zlib.crc32(body) != body_sum or counts.sum() != held:
        raise _damaged(at)
    indices = unpack(body[counts_bytes:], held, bits)
    return Page(_KINDS[kind], epoch, first, ranks, accumulation, samples, counts, indices, devices=further + 1)


def _damaged(at: str) -> RequestError:
    return RequestError(
        f"{at} is damaged: its checksum is another; give another copy of it, or move it away and continue the run "
        "with a new one."
    )


def of_kind(kind: str, pages: Iterable[Page], epoch: int | None = None) -> Iterator[Page]:
    """Return those of `pages` that are of `kind`, TRAIN or EVAL, and of `epoch` where one is given."""
    return (page for page in pages if page.kind == kind and epoch in (None, page.epoch))


def places(page: Page, sample: int) -> list[tuple[int, int, int]]:
    """Return (epoch, step, rank) of each time that `sample` is on the page."""
    cells = np.searchsorted(page.ends, np.flatnonzero(page.indices == sample), side="right").tolist()
    return [(page.epoch, page.first_step + cell // page.ranks, cell % page.ranks) for cell in cells]


def rewind(path: Path, *, step: int) -> int | None:
    """Cut the ledger back to what had happened by `step`, atomically, so that a resumed run goes on from there.

    Steps and evaluations after `step` go, and so does a last page that a kill cut short. Returns the last step that is
    left, 0 of none, and None where there is no file. Raises `RequestError` for a ledger that is damaged.
    """
    if not path.exists():
        return None
    kept, last = _until(path, step)
    if len(kept) != path.stat().st_size:
        write_whole(path, kept)
    return last


def carry_over(source: Path, path: Path, *, step: int) -> None:
    """Begin the ledger at `path` with what the run in the folder `source` had done by `step`, where it has a ledger.

    Raises `RequestError` for one that is damaged.
    """
    if (source / NAME).exists():
        write_whole(path, _until(source / NAME, step)[0])


def _until(path: Path, step: int) -> tuple[bytes, int]:
    """Return what there is up to `step`, and the last step of training in it."""
    kept, last = [], 0
    for page in read(path, torn_ok=True):
        if (part := page.until(step)) is not None:
            kept.append(part.encode())
            last = max(last, part.last_step) if part.kind == TRAIN else last
    return b"".join(kept), last
