"""Pages of a ledger, `ledger.bin`: samples by optimizer step and rank.

A page holds consecutive optimizer steps of one epoch, or one evaluation: a header of fixed size, the number of samples
of each rank in each step, and their indices, packed as bits, in order of computation. Header and body have a checksum
each, which distinguishes a page that a kill cut short from a damaged one. Each page has its own number of ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, counted
from ..files import check_filled, foreign, understanding, write_whole

NAME = "ledger.bin"
TRAIN, EVAL = "train", "eval"
Indices = npt.NDArray[np.int64]

_MAGIC, _VERSION = b"LKSL", 1
_KINDS = (TRAIN, EVAL)
# magic, version, kind, bits an index, ranks, devices of a rank but the first, accumulation, epoch, first step, steps,
# samples in the data set, indices, checksum of counts and indices, checksum of the header before it
_HEADER = struct.Struct("<4sHBBHHIQQIQQII")
_MOST_SAMPLES, _LAST_STEP = 1 << 40, 1 << 62
_MORE = 1 << 16
"""Indices that a page may hold beyond a few times the samples of its data set."""


class TornError(RequestError):
    """The file's last page is incomplete, as after a kill. All pages before are whole."""


def _bits_for(samples: int) -> int:
    return max(1, (samples - 1).bit_length())


def _pack(indices: Indices, bits: int) -> bytes:
    """Return `indices` (n,) with `bits` bits each. Lowest bit first, in ⌈n · bits ÷ 8⌉ bytes."""
    assert not len(indices) or (indices.min() >= 0 and int(indices.max()) >> bits == 0), "an index of no sample"
    octets = indices.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : -(-bits // 8)]
    return np.packbits(np.unpackbits(octets, axis=1, count=bits, bitorder="little"), bitorder="little").tobytes()


def _unpack(data: bytes, number: int, bits: int) -> Indices:
    """Return the `number` indices in `data`, (number,). Inverse of `_pack`."""
    each = np.unpackbits(np.frombuffer(data, np.uint8), count=number * bits, bitorder="little").reshape(number, bits)
    octets = np.zeros((number, 8), np.uint8)
    octets[:, : -(-bits // 8)] = np.packbits(each, axis=1, bitorder="little")
    return octets.view("<i8")[:, 0].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Page:
    """Optimizer steps of one epoch, or one evaluation. Consecutive steps (`TRAIN`), or after a step (`EVAL`)."""

    kind: str
    epoch: int
    first_step: int  # counted from 1, over the whole run
    ranks: int
    accumulation: int  # global micro-batches of a whole batch
    samples: int  # in the data set that is trained on or evaluated
    counts: npt.NDArray[np.uint32]
    """(steps, ranks): how many samples each rank computed in each step; an evaluation counts as one step."""
    indices: Indices  # (counts.sum(),): the samples by step, then rank, then as the rank computed them
    devices: int = 1  # devices that each rank drives

    @property
    def last_step(self) -> int:
        """The last step on this page."""
        return self.first_step + len(self.counts) - 1

    def places(self, sample: int) -> Iterator[tuple[int, int]]:
        """Yield (step, rank) of each occurrence of the sample."""
        ends = np.cumsum(self.counts.reshape(-1), dtype=np.int64)
        for cell in np.searchsorted(ends, np.flatnonzero(self.indices == sample), side="right").tolist():
            yield self.first_step + cell // self.ranks, cell % self.ranks

    def encode(self) -> bytes:
        """Return the page in the file's format."""
        assert self.counts.shape[1] == self.ranks, self.counts.shape
        assert self.counts.sum() == len(self.indices), "each index is some rank's"
        bits = _bits_for(self.samples)
        body = self.counts.astype("<u4").tobytes() + _pack(self.indices, bits)
        world = (self.ranks, self.devices - 1)
        numbers = (_KINDS.index(self.kind), bits, *world, self.accumulation, self.epoch, self.first_step)
        held = (len(self.counts), self.samples, len(self.indices), zlib.crc32(body))
        header = _HEADER.pack(_MAGIC, _VERSION, *numbers, *held, 0)[:-4]
        return header + struct.pack("<I", zlib.crc32(header)) + body


def read(path: Path) -> Iterator[Page]:
    """Yield the pages of the ledger at `path`, one at a time.

    Raises `RequestError` for a missing file, a damaged page, or another version of this format; and `TornError`, its
    subclass, after all whole pages where a kill cut the last one short.
    """
    try:
        file = open(path, "rb", opener=foreign)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a run that kept a ledger.") from error
    with file, understanding(path):
        check_filled(found := os.fstat(file.fileno()))
        size = found.st_size
        for number in itertools.count(1):
            if (start := file.tell()) >= size:
                return
            yield _read(file, size, f"{path}, page {number}, from byte {start} on,")


def _read(file: BinaryIO, size: int, at: str) -> Page:
    """Read the page at the file's position; `size` is in bytes. Checks the header before it uses its numbers."""
    torn = TornError(f"{at} is cut short, as by a kill; continue the run, which drops that page and records it anew.")
    damaged = RequestError(f"{at} is damaged, or of another version's format; give a copy, or move it away.")
    header = file.read(_HEADER.size)
    if header[:4] != _MAGIC[: len(header)]:
        raise damaged
    if len(header) < _HEADER.size:
        raise torn
    _, version, kind, bits, ranks, further, accumulation, epoch, first, steps, samples, held, body_sum, own_sum = (
        _HEADER.unpack(header)
    )
    is_ours = version == _VERSION and kind < len(_KINDS) and steps and ranks and accumulation and first < _LAST_STEP
    is_ours = is_ours and 0 < samples <= _MOST_SAMPLES and bits == _bits_for(samples)
    if own_sum != zlib.crc32(header[:-4]) or not is_ours:
        raise damaged
    # A page is of one epoch. Indices of a small data set take few bytes, and far more memory.
    if held > 4 * samples + _MORE:
        raise RequestError(f"{at} holds {held:,} indices, and the data set has {counted(samples, 'sample')}.")
    length = steps * ranks * 4 + -(-held * bits // 8)
    if length > size - file.tell():
        raise torn
    body = file.read(length)
    counts = np.frombuffer(body[: steps * ranks * 4], "<u4").reshape(steps, ranks).astype(np.uint32)
    if zlib.crc32(body) != body_sum or counts.sum() != held:
        raise damaged
    indices = _unpack(body[steps * ranks * 4 :], held, bits)
    return Page(_KINDS[kind], epoch, first, ranks, accumulation, samples, counts, indices, devices=further + 1)


def rewind(path: Path, *, step: int, begun: Path | None = None) -> int | None:
    """Truncate the ledger to `step`, atomically, for a resumed run.

    Removes steps and evaluations after `step`, and a last page that a kill cut short. Where the file is missing, the
    one of the run in the folder `begun` is carried over. Returns the last step that is left, 0 for none, and None where
    there is no ledger. Raises `RequestError` for one that is damaged.
    """
    source = path if path.exists() or begun is None else begun / NAME
    if not source.exists():
        return None
    kept, last = [], 0
    with contextlib.suppress(TornError):
        for page in read(source):
            if page.last_step <= step:  # a page ends where a checkpoint was saved
                kept.append(page.encode())
                last = page.last_step if page.kind == TRAIN else last
    data = b"".join(kept)
    if source != path or len(data) != path.stat().st_size:
        write_whole(path, data)
    return last
